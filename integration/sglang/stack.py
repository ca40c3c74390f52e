"""The host tier that SGLang builds where kvtier is the radix-cache backend."""

from __future__ import annotations

from functools import cache as once
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackBuildResult,
    StackStrategy,
    build_pool_entry,
    register_stack_strategy,
)
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory, get_parallel

from kvtier.errors import ConfigError
from kvtier.integration.sglang.host_pool import PagedHostPool
from kvtier.integration.sglang.plugin import BACKEND


@once
def register() -> None:
    """Offer the strategy to SGLang, before its own; once per process however often it is called."""
    register_stack_strategy(KvtierStackStrategy())


class KvtierStackStrategy(StackStrategy):
    """A `PagedHostPool` under SGLang's own controller.

    It matches whatever the model where kvtier is selected: what it cannot hold is refused by
    `build` with a ConfigError, rather than left to a host tier that nobody asked for.
    """

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return bool(get_memory().radix_cache_backend == BACKEND)

    def build(
        self,
        *,
        cache: Any,
        kvcache: Any,
        params: Any,
        server_args: Any,
        load_cache_event: Any,
        storage_backend: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        enable_storage_metrics: bool = False,
    ) -> StackBuildResult:
        _check(set(cache.components), params)
        group = _host_pool_group(kvcache, params.page_size)
        controller = HybridCacheController(
            params.token_to_kv_pool_allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=load_cache_event,
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=get_memory().hicache_write_policy,
            # Whatever the flag says: this pool takes its indices on the host.
            io_backend="direct",
            storage_backend=storage_backend,
            prefetch_threshold=prefetch_threshold,
            model_name=model_name,
            storage_backend_extra_config=storage_backend_extra_config,
            transfer_layer_id_max=kvcache.layer_num,
            enable_storage_metrics=enable_storage_metrics,
            host_memory_mode=get_memory().hicache_host_memory_mode,
        )
        pool = group.get_pool(PoolName.KV)
        return StackBuildResult(group, controller, {ComponentType.FULL: pool}, pools_desc="KV")


def _host_pool_group(kvcache: Any, page_size: int) -> HostPoolGroup:
    pool = PagedHostPool(
        kvcache,
        page_size=page_size,
        hicache_ratio=get_memory().hicache_ratio,
        hicache_size=get_memory().hicache_size,
        allocator_type=get_allocator_type(),
    )
    entry = build_pool_entry(
        name=PoolName.KV,
        host_pool=pool,
        device_pool=kvcache,
        layer_mapping={layer: layer for layer in range(pool.layer_num)},
        transfer_layer_id_max=pool.layer_num,
        is_anchor=True,
    )
    return HostPoolGroup([entry])


def _check(components: set[ComponentType], params: Any) -> None:
    """Raise ConfigError for what a host page of plain KV would leave out."""
    drafts = (
        params.mtp_draft_device_pools,
        params.sidecar_draft_device_pools,
        params.mtp_draft_mamba_pools,
    )
    others = sorted(component.name for component in components - {ComponentType.FULL})
    reasons = {
        f"KV of the kinds {', '.join(others)}": bool(others),
        "draft KV (start without speculative decoding)": any(drafts),
        "KV of a page spread over ranks (start without --dcp-size)": get_parallel().dcp_enabled,
        "KV in passing (start with --hicache-host-memory-mode cache)": (
            get_memory().hicache_host_memory_mode != "cache"
        ),
    }
    refused = next((reason for reason, found in reasons.items() if found), None)
    if refused is not None:
        raise ConfigError(
            f"kvtier's host pool does not hold {refused}; or start without "
            "--radix-cache-backend kvtier"
        )
