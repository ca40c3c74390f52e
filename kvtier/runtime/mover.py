"""Moves of a tier manager as jobs of a transfer engine."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiering.moves import Move, Why
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.job import Job, JobState, Priority

PRIORITIES = {
    Why.LOAD: Priority.URGENT,
    Why.ROOM: Priority.URGENT,
    Why.PREFETCH: Priority.NORMAL,
    Why.RESERVE: Priority.BACKGROUND,
    Why.DEMOTE: Priority.BACKGROUND,
    Why.WRITE_THROUGH: Priority.BACKGROUND,
}


class EngineMover:
    """A `Mover` whose copies are real. `on_end(move, well)` may run in any thread, at any time."""

    def __init__(self, engine: TransferEngine, on_end: Callable[[Move, bool], None]) -> None:
        self._engine = engine
        self._on_end = on_end
        self._jobs: dict[Move, Job] = {}
        self.closing = False

    def start(self, move: Move) -> None:
        """Submit the copy; once `closing`, it fails at once instead."""
        if self.closing:
            self._on_end(move, False)
            return
        job = self._engine.submit(
            move.direction, move.source_pages, move.target_pages, priority=PRIORITIES[move.why]
        )
        self._jobs[move] = job
        job.future.add_done_callback(lambda future: self._on_end(move, job.state is JobState.DONE))

    def hasten(self, move: Move) -> None:
        """A request waits for it by now."""
        job = self._jobs.get(move)
        if job is not None:  # else its end is on its way: it was never submitted
            self._engine.raise_priority(job, Priority.URGENT)

    def forget(self, move: Move) -> None:
        """The move's end has been taken note of."""
        self._jobs.pop(move, None)
