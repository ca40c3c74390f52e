"""SGLang's radix trees, and kvtier's labels on one of them, under the load of `perf.growing`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Slots:
    """Stands where SGLang's allocator is: has room without end and counts what is freed."""

    page_size: int
    device: str = "cpu"
    size: int = 1 << 40
    num_freed: int = 0

    @property
    def size_full(self) -> int:
        """The same."""
        return self.size

    def available_size(self) -> int:
        """Room for whatever comes."""
        return self.size

    def free_segment(self, indices: Any, *, start_pos: int) -> None:
        """Count them."""
        self.num_freed += len(indices)

    free_full_segment = free_segment

    def free(self, indices: Any) -> None:
        """Count them."""
        self.num_freed += len(indices)

    def mamba_full_cache_donor(self) -> None:
        """None has one."""

    def get_kvcache(self) -> None:
        """There is no KV."""


@dataclass(eq=False)
class _Params:
    custom_params: dict[str, Any]


@dataclass(eq=False)
class _Request:
    """A request as far as the cache reads it."""

    rid: str
    sampling_params: _Params
    session: None = None
    session_id: None = None


class SglangTree:
    """`kind`: rust or python (unified cache on either core), radix (its older class), labelled."""

    def __init__(self, kind: str, page_size: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.radix_cache import RadixKey

        torch.set_num_threads(1)
        self._evict, self._insert, self._match = EvictParams, InsertParams, MatchPrefixParams
        self._key = RadixKey
        self._page_size = page_size
        self._labelled = kind == "labelled"
        self._cache = build(kind, Slots(page_size))
        self._request: _Request | None = None
        self._hit: Any = None
        self._next: Any = None
        self._result: Any = None

    def match(self, step: int, program: int, tokens: array[int]) -> int:
        if self._labelled:
            labels = {"program": f"program-{program}", "label": ("busy", "idle")[program % 2]}
            self._request = _Request(str(step), _Params({"kvtier": labels}))
        key = self._key(tokens, limit=len(tokens) - 1)
        self._hit = self._cache.match_prefix(self._match(key=key, req=self._request))
        matched = getattr(self._hit, "device_prefix_len", None)
        return len(self._hit.device_indices) if matched is None else int(matched)

    def prepare(self, tokens: array[int], matched: int, first_page: int) -> None:
        aligned = len(tokens) // self._page_size * self._page_size
        start = first_page * self._page_size
        old = self._matched_slots(matched)
        row = torch.cat((old, torch.arange(start, start + aligned - matched)))
        self._next = self._insert(
            key=self._key(tokens[:aligned]),
            value=row,
            prev_prefix_len=matched,
            inserted_len=matched,
        )

    def insert(self) -> None:
        self._result = self._cache.insert(self._next)

    def finish(self) -> None:
        if self._request is not None:
            node = self._cache.tree_core.node_by_id(self._result.last_device_node)
            self._cache.programs.published(self._request.rid, node)
            self._cache.programs.ended(self._request.rid, well=True)

    def evict(self, num_tokens: int) -> int:
        return int(self._cache.evict(self._evict(num_tokens=num_tokens)).num_tokens_evicted)

    def _matched_slots(self, matched: int) -> torch.Tensor:
        if matched == 0:
            return torch.empty(0, dtype=torch.int64)
        indices = getattr(self._hit, "device_indices", None)
        if indices is None:
            indices = self._cache.path_device_indices(self._hit.last_device_node)
        found: torch.Tensor = indices[:matched]
        return found


def build(kind: str, slots: Slots) -> Any:
    """The cache alone, without pools."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(model_path="dummy", page_size=slots.page_size, device="cpu")
    set_global_server_args_for_scheduler(arguments)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=slots,
        page_size=slots.page_size,
    )
    if kind == "radix":
        return RadixCache(params)
    params.tree_components = (ComponentType.FULL,)
    params.tree_core_backend = "rust" if kind == "rust" else "python"
    if kind != "labelled":
        return UnifiedRadixCache(params)
    from kvtier.integration.sglang.cache import LabelledRadixCache
    from kvtier.integration.sglang.eviction import LabelledFullComponent

    params.component_registry_override = {ComponentType.FULL: LabelledFullComponent}
    return LabelledRadixCache(params)
