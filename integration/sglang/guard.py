"""What this integration needs of SGLang, checked before anything is changed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvtier.errors import ConfigError

SGLANG_VERSION = "0.5.23"

_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
_FULL = "sglang.srt.mem_cache.unified_cache.components:FullComponent"
_ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_HOST = "sglang.srt.mem_cache.pool_host"
PRIVATE_NAMES = (
    f"{_CACHE}._evict_device_leaf",
    f"{_CACHE}._drop_subtree_no_host",
    f"{_CACHE}._execute_and_commit_kv_backup",
    f"{_CACHE}._execute_kv_backup",
    f"{_CACHE}.check_hicache_events",
    f"{_CACHE}.has_free_load_back_slot",
    f"{_CORE}._can_reclaim_full_host_duplicate",
    f"{_CORE}._evict_host_leaf",
    f"{_CORE}._release_full_host_duplicate",
    f"{_CORE}._split_node",
    f"{_CORE}.dec_full_pin",
    f"{_CORE}.inc_full_pin",
    f"{_CORE}.node_by_id",
    f"{_FULL}.discard_deleted_session_leaf",
    f"{_FULL}.drive_host_eviction",
    f"{_FULL}.redistribute_on_node_split",
    f"{_ASSEMBLER}:build_pool_entry",
    f"{_ASSEMBLER}:register_stack_strategy",
    f"{_ASSEMBLER}:StackBuildResult",
    f"{_HOST}.base:HICACHE_HOST_MEMORY_RESERVE_BYTES",
    f"{_HOST}.base:host_memory_budget_bytes",
    f"{_HOST}.base:sync_fixed_hicache_size",
    f"{_HOST}.common:ALLOC_MEMORY_FUNCS",
    f"{_HOST}.common:get_allocator_type",
    "sglang.srt.environ:envs.SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB",
    "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    "sglang.srt.environ:envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM",
)
"""Names outside SGLang's public interface that this integration calls or overrides."""


def check_version() -> None:
    """Raise ConfigError unless the SGLang that is installed is the one this was built for."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise ConfigError(
            f"kvtier works inside SGLang {SGLANG_VERSION}, {found} is installed; "
            f"run: pip install sglang=={SGLANG_VERSION}"
        )


def check_names(names: tuple[str, ...] = PRIVATE_NAMES) -> None:
    """Raise ConfigError that lists the names ("module:attribute.path") which SGLang lacks."""
    missing = [f"{name}{why}" for name in names if (why := _lack(name)) is not None]
    if missing:
        raise ConfigError(
            f"this SGLang lacks {', '.join(missing)}, which kvtier needs; "
            f"install an unchanged SGLang {SGLANG_VERSION}"
        )


def _lack(name: str) -> str | None:
    """None where the name exists, else why not, "" where that is plain."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:  # whatever a module raises while it is imported
        return f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return ""
        found = getattr(found, attribute)
    return None
