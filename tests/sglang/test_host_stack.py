"""The host tier inside SGLang's own cache and controller: chosen by flag, exact to the byte."""

from __future__ import annotations

import atexit
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier.errors import ConfigError
from kvtier.integration.sglang.host_pool import PagedHostPool
from kvtier.integration.sglang.stack import KvtierStackStrategy, register

from .host_pools import Shape, as_bytes, device_pool, fill, tensors, wipe

PAGES = 8
SHAPES = {
    "mha-token": Shape(torch.bfloat16, 1),
    "mha": Shape(torch.bfloat16, 16, v_head_dim=16),
    "mla": Shape(torch.float32, 16, v_head_dim=0),
}


@dataclass
class Engine:
    """SGLang's cache over real pools, as its scheduler builds it, without the host tier."""

    shape: Shape
    core: str = "python"
    changed: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    cache: Any = None

    def __post_init__(self) -> None:
        size = self.shape.page_size
        flags = {"radix_cache_backend": "kvtier", "hicache_ratio": 2.0} | self.changed
        self.arguments = ServerArgs(
            model_path="dummy",
            page_size=size,
            device="cpu",
            hicache_write_policy="write_through",
            **flags,
        )
        set_global_server_args_for_scheduler(self.arguments)
        self.pool = device_pool(self.shape, PAGES)
        common = {"device": "cpu", "kvcache": self.pool, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(PAGES, torch.bfloat16, **common)
            if size == 1
            else PagedTokenToKVPoolAllocator(PAGES * size, size, torch.bfloat16, **common)
        )
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(2, 256, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=self.core,
            **self.more,
        )
        self.cache = UnifiedRadixCache(self.params)

    def start_host_tier(self) -> PagedHostPool:
        with host_memory_budget_scope(1 << 30):
            self.cache.init_hicache(self.arguments, self.params)
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0
        pool: PagedHostPool = self.cache.cache_controller.storage_host_pool
        return pool

    def key(self, num_pages: int) -> RadixKey:
        return RadixKey(array("q", range(1, num_pages * self.shape.page_size + 1)))

    def rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of these slots in every tensor, layer after layer."""
        every = [tensor for layer in tensors(self.pool) for tensor in layer]
        return [as_bytes(tensor)[slots].clone() for tensor in every]


@pytest.fixture(autouse=True)
def strategies() -> Iterator[list[Any]]:
    """SGLang's strategies with ours before them, as they are in a process with the plug-in."""
    register()
    return hybrid_pool_assembler._STRATEGIES


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("name", SHAPES)
def test_kv_that_was_written_through_and_evicted_loads_back_byte_for_byte(
    name: str, core: str
) -> None:
    engine = Engine(SHAPES[name], core)
    host = engine.start_host_tier()
    cache, size = engine.cache, engine.shape.page_size
    fill(engine.pool)
    slots = engine.allocator.alloc(4 * size)
    before = engine.rows(slots)
    cache.insert(InsertParams(key=engine.key(4), value=slots))
    cache.flush_pending_backups()
    cache.writing_check()
    assert host.size - host.available_size() == 4 * size

    cache.evict(EvictParams(num_tokens=4 * size))
    assert engine.allocator.available_size() == PAGES * size
    wipe(engine.pool)
    blocker = engine.allocator.alloc(2 * size)  # the KV comes back to other slots
    match = cache.match_prefix(MatchPrefixParams(key=engine.key(4)))
    assert (match.device_prefix_len, match.host_hit_length) == (0, 4 * size)
    assert cache.load_back(match.best_match_node)
    cache.ready_to_load_host_cache()
    cache.loading_check()

    match = cache.match_prefix(MatchPrefixParams(key=engine.key(4)))
    assert match.device_prefix_len == 4 * size
    loaded = cache.tree_core.get_component_device_value(match.last_device_node, ComponentType.FULL)
    assert not set(loaded.tolist()) & set(blocker.tolist())
    after = engine.rows(loaded)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    cache.release_host_resources()
    assert host.kv_buffer is None


def test_the_strategy_is_registered_once_however_often_it_is_asked_for(
    strategies: list[Any],
) -> None:
    register()
    assert sum(isinstance(strategy, KvtierStackStrategy) for strategy in strategies) == 1


@pytest.mark.parametrize("backend", [None, "another"])
def test_sglang_keeps_its_own_host_tier_where_kvtier_is_not_selected(backend: str | None) -> None:
    engine = Engine(SHAPES["mha"])
    ours = hybrid_pool_assembler._select_strategy(engine.pool, {ComponentType.FULL})
    assert isinstance(ours, KvtierStackStrategy)
    stock = Engine(SHAPES["mha"], changed={"radix_cache_backend": backend})
    chosen = hybrid_pool_assembler._select_strategy(stock.pool, {ComponentType.FULL})
    assert isinstance(chosen, hybrid_pool_assembler._PlainKvStrategy)


def test_the_flags_size_the_pool_and_indices_stay_on_the_host() -> None:
    engine = Engine(SHAPES["mha"], changed={"hicache_ratio": 1.3, "hicache_io_backend": "kernel"})
    host = engine.start_host_tier()
    assert host.page_num == 10  # 1.3 times 8 pages, rounded down
    assert engine.cache.cache_controller.io_backend == "direct"
    engine.cache.release_host_resources()


_UNHELD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "packed drafts": ({}, {"mtp_draft_device_pools": (object(),)}, "without speculative decoding"),
    "drafts": ({}, {"sidecar_draft_device_pools": (object(),)}, "without speculative decoding"),
    "in passing": ({"hicache_host_memory_mode": "buffer_only"}, {}, "KV in passing"),
    "too small": ({"hicache_ratio": 0.1}, {}, "less than one page of 16"),
}


@pytest.mark.parametrize("case", _UNHELD)
def test_what_the_tier_cannot_hold_stops_the_start_with_one_line(case: str) -> None:
    changed, more, message = _UNHELD[case]
    engine = Engine(SHAPES["mha"], changed=changed, more=more)
    with pytest.raises(ConfigError, match=message) as refusal:
        engine.start_host_tier()
    assert "\n" not in str(refusal.value)


def test_pages_spread_over_ranks_stop_the_start() -> None:
    engine = Engine(SHAPES["mla"])
    with get_parallel().override(dcp_enabled=True), pytest.raises(ConfigError, match="--dcp-size"):
        engine.start_host_tier()


def test_kv_of_other_kinds_stops_the_start() -> None:
    engine = Engine(SHAPES["mha"])
    engine.cache.components[ComponentType.SWA] = engine.cache.components[ComponentType.FULL]
    with pytest.raises(ConfigError, match="KV of the kinds SWA"):
        engine.start_host_tier()
