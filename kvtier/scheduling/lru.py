"""LRU: no queues by memory. Whoever is admitted runs, and the engine's cache sorts itself out."""

from __future__ import annotations

from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.state import ProgramState, Queue, WorkerState


class Lru(Scheduler):
    """Every program may run; only a window holds any back.

    On a cut the latest admitted go first, at their next boundary, and return in order (CONCUR
    section 4.3 leaves the choice open). Their KV is left to the engine's own LRU: no commands.
    """

    name = "lru"

    def rank(self, state: ProgramState, now_s: float) -> float:
        del now_s
        return float(state.entered)

    def promotion_key(self, state: ProgramState, now_s: float) -> tuple[float, ...]:
        del now_s
        return (0.0, state.moved_s) if state.entered else (1.0, float(state.sequence))

    def fits(self, worker: WorkerState, state: ProgramState) -> bool:
        del worker, state
        return True

    def overflows(self, worker: WorkerState) -> bool:
        del worker
        return False

    def displaced(
        self, worker: WorkerState, state: ProgramState, now_s: float, *, forced: bool
    ) -> list[ProgramState]:
        del worker, state, now_s, forced
        return []

    def depart(self, state: ProgramState, now_s: float) -> None:
        self._place(state, Queue.WAITING, now_s)

    def settle(self, state: ProgramState, previous: Queue) -> None:
        del state, previous

    def lose_copy(self, state: ProgramState, now_s: float) -> None:
        self._place(state, Queue.WAITING, now_s)

    def targets(self, state: ProgramState) -> list[WorkerState]:
        own = self._worker_of(state)
        if own is not None and state.tokens <= own.hbm_tokens:
            return [own]
        large = [w for w in self.workers.values() if state.tokens <= w.hbm_tokens]
        return sorted(large, key=lambda w: (w.num_gpu, w.worker))
