"""kvtier's cache over real pools of SGLang, with real requests driven as its scheduler does."""

from __future__ import annotations

import atexit
import os
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestOutcome,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import Tensor

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import AnyCommand, Result
from kvtier.integration.sglang.factory import build_cache
from kvtier.integration.sglang.worker import Worker
from kvtier.tree.holders import RANKS

from .host_pools import Shape, as_bytes, device_pool, tensors

Node = Any
WRITE_THROUGH, WRITE_BACK = "write_through", "write_back"
RECLAIM = "SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM"  # the factory sets it for the process


def build_context(
    page_size: int = 1,
    pages: int = 32,
    *,
    num_rows: int = 8,
    flags: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    **changed: Any,
) -> TreeCacheBuildContext:
    """What SGLang gives to a radix-cache factory, over a device pool of `pages` pages."""
    arguments = ServerArgs(
        model_path="dummy",
        page_size=page_size,
        device="cpu",
        radix_cache_backend="kvtier",
        enable_hierarchical_cache=True,
        **flags or {},
    )
    set_global_server_args_for_scheduler(arguments)
    made = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(num_rows, 2048, "cpu", False),
        token_to_kv_pool_allocator=_allocator(page_size, pages),
        page_size=page_size,
        **params or {},
    )
    context = {
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": True,
        "disable_radix_cache": False,
        "tp_worker": SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None),
        "model_config": None,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    return TreeCacheBuildContext(arguments, made, **context | changed)


def _allocator(page_size: int, pages: int) -> Any:
    shape = Shape(torch.bfloat16, page_size, num_layers=2, head_num=1, head_dim=8, v_head_dim=8)
    common = {"device": "cpu", "kvcache": device_pool(shape, pages), "need_sort": False}
    if page_size == 1:
        return TokenToKVPoolAllocator(pages, torch.bfloat16, **common)
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.bfloat16, **common)


class LiveCache:
    """A `LabelledRadixCache` made by kvtier's factory, and the calls of SGLang's scheduler.

    Every KV byte that a request computes follows from its tokens up to there, so that all bytes in
    both tiers can be checked at any time. `now_s` is the worker's clock.
    """

    def __init__(
        self, policy: str, page_size: int = 1, hbm: int = 32, dram: int = 32, num_rows: int = 8
    ) -> None:
        """`hbm` and `dram` count pages; `hbm` is a power of two, so that the ratio is exact."""
        self.page_size, self.policy, self.now_s = page_size, policy, 0.0
        flags = {"hicache_write_policy": policy, "hicache_ratio": dram / hbm}
        context = build_context(page_size, hbm, num_rows=num_rows, flags=flags)
        self._reclaim = os.environ.get(RECLAIM)
        with host_memory_budget_scope(1 << 30):
            self.cache = build_cache(context)
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0
        self.cache.worker = Worker(self.cache, clock=lambda: self.now_s)
        self.rows = context.params.req_to_token_pool
        self.allocator = context.params.token_to_kv_pool_allocator
        self.host = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        self.running: list[Req] = []
        self._num_requests = 0
        assert (self.allocator.size, self.host.size) == (hbm * page_size, dram * page_size)

    def close(self) -> None:
        self.cache.release_host_resources()
        os.environ.pop(RECLAIM, None)
        if self._reclaim is not None:
            os.environ[RECLAIM] = self._reclaim

    # What a request goes through.

    def request(
        self,
        tokens: Sequence[int],
        program: str | None = None,
        label: str | None = None,
        epoch: int | None = None,
        **carriers: Any,
    ) -> Req:
        """A request as SGLang's scheduler makes it, not looked up yet."""
        named = {"program": program, "label": label, "epoch": epoch}
        custom = {"kvtier": {name: value for name, value in named.items() if value is not None}}
        self._num_requests += 1
        return Req(
            rid=f"r{self._num_requests}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(
                max_new_tokens=64, custom_params=custom if program is not None else None
            ),
            **carriers,
        )

    def look_up(self, req: Req) -> Req:
        """One pass of the scheduler over a waiting request."""
        req.init_next_round_input(self.cache)
        return req

    def load(self, req: Req) -> int:
        """Load what DRAM has of the request's prompt; how many tokens."""
        if not req.needs_host_load_back():
            return 0
        loaded, req.last_node = self.cache.init_load_back(
            InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
        )
        req.prefix_len += loaded
        req.kv.cache_protected_len = req.prefix_len
        return int(loaded)

    def admit(self, req: Req, end: int | None = None) -> Req:
        """Load, lock, allocate and compute the prompt up to `end`."""
        self.load(req)
        req.extend_end = len(req.full_untruncated_fill_ids) if end is None else end
        req.lock = self.cache.lock(req.last_node)
        self.cache.ready_to_load_host_cache()
        self.rows.alloc([req])
        self.running.append(req)
        self._row(req)[: req.prefix_len] = self.cache.prefix_device_indices(req)
        self._extend(req, req.prefix_len, req.extend_end)
        return req

    def publish(self, req: Req) -> Req:
        """A chunk is computed; the first token comes out after the last one."""
        checkpoint_kv_cache(req, self.cache)
        return req

    def next_chunk(self, req: Req, end: int | None = None) -> Req:
        req.extend_end = len(req.full_untruncated_fill_ids) if end is None else end
        self._extend(req, req.prefix_len, req.extend_end)
        return self.publish(req)

    def decode(self, req: Req, tokens: Sequence[int]) -> Req:
        """Each token is sampled, then computed."""
        for token in tokens:
            req.output_ids.append(token)
            req.refresh_fill_ids()
            self._extend(req, req.kv.kv_allocated_len, req.kv.kv_allocated_len + 1)
        return req

    def end(self, req: Req, *, aborted: bool = False, checkpoint: bool = True) -> None:
        req.finished_reason = FINISH_ABORT() if aborted else FINISH_LENGTH(length=0)
        release_kv_cache(req, self.cache, checkpoint=checkpoint)
        self.running.remove(req)

    def abort_waiting(self, req: Req) -> None:
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def abort_in_prefill(self, req: Req) -> None:
        """As between two chunks."""
        self.abort_waiting(req)
        self.end(req, aborted=True, checkpoint=False)

    def retract(self, req: Req) -> None:
        release_kv_cache(req, self.cache, checkpoint=False)
        self.running.remove(req)
        req.reset_for_retract()

    def start(self, tokens: Sequence[int], *named: Any, **more: Any) -> Req:
        """A request whose whole prompt is computed and published."""
        return self.publish(self.admit(self.look_up(self.request(tokens, *named, **more))))

    def serve(self, tokens: Sequence[int], *named: Any, output: Sequence[int] = ()) -> Req:
        """A request from arrival to end; copies that it started are over."""
        req = self.decode(self.start(tokens, *named), output)
        self.end(req)
        self.tick()
        return req

    # What happens between requests.

    def tick(self) -> None:
        """Between two steps of the scheduler."""
        self.cache.check_hicache_events()

    def execute(self, command: AnyCommand) -> Result:
        return self.cache.worker.execute(command)

    def evict(self, num_tokens: int = 1) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted)

    def flush(self) -> None:
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def hits(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Tokens of the prompt in HBM, and after them in DRAM alone."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return match.device_prefix_len, match.host_hit_length

    # What is there.

    def nodes(self) -> Iterator[Node]:
        """All nodes that can be reached, parents first."""
        stack = list(self.cache.tree_core.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def held(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Counts of holders by rank of each token in the tree, however nodes divide it."""
        found = {}
        for node in self.nodes():
            path, counts = path_of(node), counts_of(node)
            for length in range(len(path) - len(node.key) + 1, len(path) + 1):
                found[path[:length]] = counts
        return found

    def check(self) -> None:
        """Raise AssertionError where sums, reachability, holders, bytes or SGLang's own are off."""
        if not (self.policy == WRITE_THROUGH and self.cache.ongoing_load_back):
            self.cache.sanity_check()  # there it misses duplicates that it tracks once loaded
        self._check_pools()
        self._check_holders()
        self._check_bytes()

    def check_idle(self) -> None:
        """`check`, and nothing is locked, running or under way."""
        self.check()
        assert self.cache.protected_size() == 0
        datas = [node.component_data[0] for node in self.nodes()]
        assert [(d.lock_ref, d.host_lock_ref) for d in datas] == [(0, 0)] * len(datas)
        assert not self.cache.ongoing_write_through
        assert not self.cache.ongoing_load_back
        assert self.rows.available_size() == self.rows.size

    def _check_pools(self) -> None:
        own = sum(
            -(-req.kv.kv_allocated_len // self.page_size) * self.page_size
            - req.kv.cache_protected_len
            for req in self.running
        )
        cached = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + cached + own == self.allocator.size
        reached = [node.component_data[0].host_value for node in self.nodes() if node.backuped]
        slots = torch.cat(reached).tolist() if reached else []
        assert len(set(slots)) == len(slots)
        assert self.host.size - self.host.available_size() == len(slots)

    def _check_holders(self) -> None:
        """The counts of each node are what the anchors in its subtree make them."""
        expected: dict[int, list[int]] = {}
        alive = {node.id for node in self.nodes()}
        for program in self.cache.programs:
            for anchor in program.anchors():
                node = anchor.node
                assert node is None or node.id in alive
                while node is not None and node.parent is not None:
                    expected.setdefault(node.id, [0, 0, 0])[RANKS[program.label]] += 1
                    node = node.parent
        for node in self.nodes():
            assert counts_of(node) == tuple(expected.get(node.id, (0, 0, 0)))

    def _check_bytes(self) -> None:
        every = [as_bytes(t) for layer in tensors(self.allocator.get_kvcache()) for t in layer]
        for node in self.nodes():
            data, path = node.component_data[0], path_of(node)
            first = len(path) - len(node.key)
            for segment, rows in enumerate(every):
                right = kv_bytes(path, segment, rows.shape[1])[first:]
                if data.value is not None:
                    assert torch.equal(rows[data.value], right)
                if data.host_value is not None and node.write_through_pending_id is None:
                    assert torch.equal(self._host_rows(data.host_value, segment), right)

    def _host_rows(self, slots: Tensor, segment: int) -> Tensor:
        """The bytes of these slots in DRAM: a page is one segment after the other."""
        num_segments = 2 * self.host.layer_num
        pages = self.host.kv_buffer.view(self.host.page_num, num_segments, self.page_size, -1)
        return pages[slots // self.page_size, segment, slots % self.page_size]

    def _row(self, req: Req) -> Tensor:
        return self.rows.req_to_token[req.kv.req_pool_idx]

    def _extend(self, req: Req, begin: int, end: int) -> None:
        """Slots for tokens [begin, end) of the request, and their KV."""
        row = self._row(req)
        if self.page_size == 1:
            slots = alloc_token_slots(self.cache, end - begin)
        else:
            lengths = torch.tensor([begin]), torch.tensor([end])
            last = row[begin - 1 : begin].to(torch.int64) if begin else torch.tensor([-1])
            slots = alloc_paged_token_slots_extend(
                self.cache, lengths[0], lengths[0], lengths[1], lengths[1], last, end - begin
            )
        row[begin:end] = slots
        tokens = req.full_untruncated_fill_ids[:end]
        every = [as_bytes(t) for layer in tensors(self.allocator.get_kvcache()) for t in layer]
        for segment, rows in enumerate(every):
            rows[slots] = kv_bytes(tokens, segment, rows.shape[1])[begin:]
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end


def path_of(node: Node) -> tuple[int, ...]:
    """The tokens from the root to the node's end."""
    parts = []
    while node.parent is not None:
        parts.append(node.key.token_ids[: len(node.key)])
        node = node.parent
    return tuple(token for part in reversed(parts) for token in part)


def counts_of(node: Node) -> tuple[int, ...]:
    """INACTIVE, IDLE and BUSY holders of the node."""
    holding = getattr(node, "holding", None)
    return (0, 0, 0) if holding is None else tuple(holding.counts)


def rank(label: Label) -> int:
    """2 for BUSY, 1 for IDLE, 0 for INACTIVE."""
    return [Label.INACTIVE, Label.IDLE, Label.BUSY].index(label)


def kv_bytes(tokens: Sequence[int], segment: int, row_bytes: int) -> Tensor:
    """uint8[len(tokens), row_bytes]: each row is another for another prompt up to its token."""
    hashes, state = [], segment + 1
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
        hashes.append(state)
    words = -(-row_bytes // 8)
    rows = np.array(hashes, dtype=np.uint64)[:, None] * np.arange(1, 2 * words, 2, dtype=np.uint64)
    rows ^= rows >> np.uint64(29)
    return torch.from_numpy(rows.view(np.uint8)[:, :row_bytes].copy())
