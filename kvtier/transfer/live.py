"""What the core keeps of a job until it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.transfer.chunks import Piece
    from kvtier.transfer.job import Job, JobState
    from kvtier.transfer.order import Rank
    from kvtier.transfer.usage import Index, Users


@dataclass(eq=False, slots=True)
class Live:
    """A job, what is left of it to start, and its ties to other live jobs by their ids."""

    job: Job
    source: Index
    target: Index
    source_users: Users
    target_users: Users
    """Who had these pages when it came."""
    pieces: Iterator[Piece]
    piece: Piece | None
    """What its next chunk copies; None where there will be none."""
    rank: Rank
    bytes_left: int
    """Not started."""
    blockers: dict[int, Live]
    """Jobs that it waits for."""
    heirs: dict[int, Live] = field(default_factory=dict)
    """Jobs that wait for it."""
    chunks_in_flight: int = 0
    bytes_in_flight: int = 0
    ending: JobState | None = None
    """How it ends once no chunk is in flight; None for DONE."""


def closure(lives: Iterable[Live]) -> list[Live]:
    """These jobs and all that they wait for, each once."""
    found = {live.job.id: live for live in lives}
    waiting = list(found.values())
    while waiting:
        for blocker in waiting.pop().blockers.values():
            if blocker.job.id not in found:
                found[blocker.job.id] = blocker
                waiting.append(blocker)
    return list(found.values())
