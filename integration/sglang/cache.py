"""SGLang's unified radix cache with programs: labels, both eviction orders, commands."""

from __future__ import annotations

from typing import Any
from weakref import finalize

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, EvictParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvtier.integration.sglang.control.server import ControlServer
from kvtier.integration.sglang.identity import identity_of
from kvtier.integration.sglang.worker import Worker
from kvtier.tree.programs import Programs


class LabelledRadixCache(UnifiedRadixCache):
    """Follows every request of a program through the cache and obeys the control channel.

    All methods but those of the channel's own thread run on SGLang's scheduler thread.
    """

    def __init__(self, params: Any) -> None:
        # Before super(): it resets the tree.
        self.programs = Programs()
        self.worker = Worker(self)
        self.control: ControlServer | None = None
        self.backed_up_now: Any = None
        super().__init__(params)

    def match_prefix(self, params: Any) -> Any:
        """Look the prompt up; the request's program holds what it matched."""
        result = super().match_prefix(params)
        if params.req is not None and not self.disable:
            self._note_match(params.req, self.tree_core.node_by_id(result.best_match_node))
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's pages; its program holds them."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if not self.disable and req.last_node is not None:
            self.programs.published(req.rid, self.tree_core.node_by_id(req.last_node))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """The request's row is free: it has ended, or it was retracted and comes again."""
        super().on_release(req, checkpointed=checkpointed)
        if not req.finished():
            self.programs.retracted(req.rid)
            return
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self._note_end(req.rid, well=not isinstance(req.finished_reason, FINISH_ABORT))

    def finish(self, handle: Any, outcome: Any) -> None:
        """The request ended; an aborted one may never have had a row."""
        super().finish(handle, outcome)
        if outcome is CacheRequestOutcome.ABORT:
            self._note_end(handle.rid, well=False)

    def reset(self) -> None:
        """Empty the tree and both pools."""
        super().reset()
        self.worker.forget()

    def check_hicache_events(self) -> None:
        """Poll copies, then obey the control channel. Called at every step of the scheduler."""
        super().check_hicache_events()
        self.worker.tick()

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        """Make room for a request; where nothing else is left, pins give way."""
        room = self.token_to_kv_pool_allocator.available_size
        target = room() + params.num_tokens
        result = super().evict_for_alloc(params, **kwargs)
        missing = target - room()
        if missing > 0 and params.num_tokens:
            self.worker.pins.give_way(missing)
            more = super().evict_for_alloc(EvictParams(num_tokens=missing), **kwargs)
            result.num_tokens_evicted += more.num_tokens_evicted
        return result

    def evictable_size(self) -> int:
        """Tokens that could leave HBM for a request, pinned ones included."""
        size: int = super().evictable_size()
        return size + self.worker.pins.yieldable_tokens()

    def protected_size(self) -> int:
        """Tokens that running requests and copies keep in HBM."""
        size: int = super().protected_size()
        return size - self.worker.pins.yieldable_tokens()

    def full_evictable_size(self) -> int:
        """As `evictable_size`: full attention is all there is."""
        return self.evictable_size()

    def full_protected_size(self) -> int:
        """As `protected_size`."""
        return self.protected_size()

    def _execute_kv_backup(self, node_id: Any, *arguments: Any) -> Any:
        """Copy a node to DRAM; making room there must not take the copy of its parent."""
        self.backed_up_now = self.tree_core.node_by_id(node_id)
        try:
            return super()._execute_kv_backup(node_id, *arguments)
        finally:
            self.backed_up_now = None

    def ready_to_load_host_cache(self) -> int:
        """Start the loads of a prefill batch, which also waits for those that commands started."""
        self.worker.moves.order_loads()
        index: int = super().ready_to_load_host_cache()
        return index

    def release_host_resources(self) -> None:
        """Close the control channel and give the host pool back."""
        if self.control is not None:
            self.control.close()
        super().release_host_resources()

    def _note_match(self, req: Any, node: Any) -> None:
        if hasattr(req, "kvtier_run"):
            if req.kvtier_run is not None:
                self.programs.matched(req.rid, req.kvtier_run, node)
            return
        identity = identity_of(req)
        req.kvtier_run = None
        if identity is None:
            return
        run = req.kvtier_run = self.programs.begin(
            req.rid, identity.program, node, label=identity.label, epoch=identity.epoch
        )
        # A request that SGLang drops without a word must not keep its label for ever.
        finalize(req, self.worker.lost.append, (req.rid, run)).atexit = False

    def _note_end(self, request: str, *, well: bool) -> None:
        program = self.programs.ended(request, well=well)
        if program is not None:
            self.worker.pins.follow(program)
