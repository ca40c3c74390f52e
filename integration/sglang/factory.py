"""Builds the cache where SGLang builds its own; imports nothing heavy before that."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvtier.errors import ConfigError

_LOG = logging.getLogger(__name__)


def build_cache(context: Any) -> Any:
    """SGLang's factory of radix-cache backend "kvtier" (its TreeCacheBuildContext in).

    Raises ConfigError in one line for what does not work together with kvtier.
    """
    from kvtier.integration.sglang import guard, settings

    control = settings.control_of(os.environ)
    guard.check_names()
    _check_options(context)
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from kvtier.integration.sglang import stack
    from kvtier.integration.sglang.cache import LabelledRadixCache
    from kvtier.integration.sglang.eviction import LabelledFullComponent

    # Duplicates have their place in our own DRAM order instead of before it.
    envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM.set(True)
    stack.register()
    context.params.component_registry_override = {ComponentType.FULL: LabelledFullComponent}
    context.params.tree_core_backend = "python"
    cache = create_unified_radix_cache(context, cache_class=LabelledRadixCache)
    if control is not None:
        cache.control = _listen(control.address, control.token, cache.worker.inbox)
    return cache


def _listen(address: Any, token: str, inbox: Any) -> Any:
    from kvtier.integration.sglang.control.server import ControlServer

    server = ControlServer(address, token, inbox)
    server.start()
    _LOG.info("kvtier control channel on %s", server.address)
    return server


def _check_options(context: Any) -> None:
    """Refuse what is not built or not tested yet, with what to do."""
    for refused, message in _refusals(context):
        if refused:
            raise ConfigError(f"--radix-cache-backend kvtier {message}")


def _refusals(context: Any) -> list[tuple[bool, str]]:
    args, params = context.server_args, context.params
    return [
        (context.disable_radix_cache, "is a radix cache; drop --disable-radix-cache"),
        (
            not context.enable_hierarchical_cache,
            "moves KV to host memory; add --enable-hierarchical-cache",
        ),
        (
            context.is_hybrid_swa or context.is_hybrid_ssm or context.is_dsa,
            "serves models with full attention only, not sliding windows, Mamba or DSA",
        ),
        (params.is_eagle, "does not work with speculative decoding yet; drop it"),
        (
            context.tp_size > 1 or args.dp_size > 1 or params.pp_size > 1,
            "runs on one rank yet; set tensor, data and pipeline parallel size to 1",
        ),
        (
            params.eviction_policy != "lru",
            "orders eviction by label; drop --radix-eviction-policy",
        ),
        (
            params.enable_session_radix_cache or args.enable_streaming_session,
            "knows programs instead of sessions; drop the session flags",
        ),
        (
            args.hicache_storage_backend is not None,
            "has no third tier yet; drop --hicache-storage-backend",
        ),
        (
            args.hicache_host_memory_mode != "cache",
            "keeps KV in host memory; drop --hicache-host-memory-mode",
        ),
        (
            args.disaggregation_mode != "null",
            "does not work with disaggregated prefill and decode yet",
        ),
    ]
