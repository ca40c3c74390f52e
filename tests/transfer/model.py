"""What must become of transfer jobs and of the bytes they move, in the plainest form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvtier.ids import Direction
from kvtier.transfer.job import Job, JobState, Priority

from .scene import Bytes, Copy


class Phase(Enum):
    """Where a job is; finer than JobState where an operation can tell the difference."""

    BLOCKED = auto()
    """Queued behind jobs that it came after."""
    QUEUED = auto()
    BETWEEN = auto()
    """Some chunks have ended, none is in flight, some were not begun."""
    MOVING = auto()
    CANCELLING = auto()
    """Cancelled with chunks in flight."""
    FAILING = auto()
    """A chunk failed with others in flight."""
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


STATES = {
    Phase.BLOCKED: JobState.QUEUED,
    Phase.QUEUED: JobState.QUEUED,
    Phase.BETWEEN: JobState.IN_FLIGHT,
    Phase.MOVING: JobState.IN_FLIGHT,
    Phase.CANCELLING: JobState.IN_FLIGHT,
    Phase.FAILING: JobState.IN_FLIGHT,
    Phase.DONE: JobState.DONE,
    Phase.FAILED: JobState.FAILED,
    Phase.CANCELLED: JobState.CANCELLED,
}
WITH_CHUNKS = (Phase.MOVING, Phase.CANCELLING, Phase.FAILING)
LIVE = (Phase.BLOCKED, Phase.QUEUED, Phase.BETWEEN, *WITH_CHUNKS)
ENDED = (Phase.DONE, Phase.FAILED, Phase.CANCELLED)


class Cell(Enum):
    """What happened to one segment of one page of a job."""

    UNTOUCHED = auto()
    IN_FLIGHT = auto()
    MOVED = auto()
    LOST = auto()


class How(NamedTuple):
    """Arguments of a job, besides its pages and those that it comes after."""

    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    layerwise: bool = False


class Urgency(NamedTuple):
    """Less is more urgent. Not held back by a window, priority, deadline."""

    held: bool
    priority: Priority
    deadline_s: float


@dataclass(eq=False)
class Moved:
    """A job as the model sees it."""

    number: int
    direction: Direction
    copy: Copy
    """What it copies."""
    targets: list[int]
    after: list[Moved]
    how: How
    num_segments: int
    room_of: Copy | None = None
    """What lies in its targets until it begins."""
    job: Job | None = None
    cancelled: bool = False
    failed: bool = False
    over: Phase | None = None
    settled: bool = False
    """The driver has seen its end, and has done with its pages what follows from it."""
    polled: bool = False
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    sources: list[int] = field(init=False)
    content: Bytes = field(init=False)
    urgency: Urgency = field(init=False)

    def __repr__(self) -> str:
        after = [earlier.number for earlier in self.after]
        return f"<{self.number}: {self.direction} {self.phase} {self.urgency} {after=}>"

    def __post_init__(self) -> None:
        rows, segments = range(len(self.targets)), range(self.num_segments)
        self.cells = {(row, segment): Cell.UNTOUCHED for row in rows for segment in segments}
        # A later generation of the copy, and a part of it that is given away, are not its business.
        self.sources, self.content = self.copy.pages, self.copy.content
        self.urgency = urgency(self.how.priority, self.how.deadline_s)

    @property
    def live(self) -> bool:
        return self.over is None

    @property
    def blocked(self) -> bool:
        return any(earlier.live for earlier in self.after)

    @property
    def phase(self) -> Phase:
        if self.over is not None:
            return self.over
        cells = set(self.cells.values())
        if Cell.IN_FLIGHT in cells:
            if self.cancelled:
                return Phase.CANCELLING
            return Phase.FAILING if self.failed else Phase.MOVING
        if self.blocked:
            return Phase.BLOCKED
        return Phase.QUEUED if self.untouched else Phase.BETWEEN

    @property
    def may_go_on(self) -> bool:
        """Whether a chunk of it may begin."""
        stopped = self.blocked or self.cancelled or self.failed
        return self.live and not stopped and Cell.UNTOUCHED in self.cells.values()

    def cells_of(self, targets: Iterable[int], segments: Iterable[int]) -> list[tuple[int, int]]:
        places = {page: row for row, page in enumerate(self.targets)}
        rows = [places[page] for page in targets]
        return [(row, segment) for row in rows for segment in segments]

    def cells_in(self, state: Cell) -> list[tuple[int, int]]:
        return [cell for cell, now in self.cells.items() if now is state]

    @property
    def untouched(self) -> bool:
        """Not one chunk of it began."""
        return set(self.cells.values()) == {Cell.UNTOUCHED}

    def has_moved(self, segments: Iterable[int]) -> bool:
        """Whether these segments have arrived on all of its pages."""
        rows = range(len(self.targets))
        return all(self.cells[row, segment] is Cell.MOVED for segment in segments for row in rows)

    def pages_moved(self) -> int:
        """Pages whose bytes have all arrived."""
        missing = {row for (row, _), state in self.cells.items() if state is not Cell.MOVED}
        return len(self.targets) - len(missing)

    def turn(self, cells: Iterable[tuple[int, int]], before: Cell, now: Cell) -> None:
        """Each cell goes through its states once, in order."""
        for cell in cells:
            assert self.cells[cell] is before, f"{cell} of job {self.number}: {self.cells[cell]}"
            self.cells[cell] = now

    def hasten(self, urgency: Urgency) -> None:
        """It, and those it waits for, are at least as urgent as that."""
        self.urgency = min(self.urgency, urgency)
        passed_on = self.urgency._replace(held=self.urgency.priority is not Priority.URGENT)
        for earlier in self.after:
            if earlier.live:
                earlier.hasten(passed_on)

    def end_if_over(self) -> bool:
        """Nothing in flight, and nothing more to begin. Law 2: not before."""
        cells = set(self.cells.values())
        if not self.live or Cell.IN_FLIGHT in cells:
            return False
        if self.cancelled:
            self.over = Phase.CANCELLED
        elif self.failed:
            self.over = Phase.FAILED
        elif cells == {Cell.MOVED}:
            self.over = Phase.DONE
        return self.over is not None


class Model:
    """All jobs, and which of them may have the next chunk."""

    def __init__(self) -> None:
        self.jobs: list[Moved] = []
        """Those that are live, and some that ended."""
        self.ends: dict[Phase, int] = dict.fromkeys(ENDED, 0)

    def live(self, direction: Direction | None = None) -> list[Moved]:
        return [m for m in self.jobs if m.live and direction in (None, m.direction)]

    def first(self, direction: Direction) -> Moved:
        """Of the jobs that may have a chunk, the most urgent one."""
        may = [moved for moved in self.live(direction) if moved.may_go_on]
        return min(may, key=lambda moved: moved.urgency)

    def waited_for(self, moved: Moved) -> set[Moved]:
        """Live jobs that end before it begins."""
        found: set[Moved] = set()
        for earlier in moved.after:
            if earlier.live:
                found |= {earlier} | self.waited_for(earlier)
        return found

    def conflict(self, new: Moved) -> Moved | None:
        """A live job that shares a page with it other than to read it, and not in its order."""
        for other in set(self.live()) - self.waited_for(new) - {new}:
            if new.direction is other.direction:
                shared = {*new.targets} & {*other.targets}
            else:
                shared = {*new.targets} & {*other.sources} | {*new.sources} & {*other.targets}
            if shared:
                return other
        return None

    def settle(self) -> None:
        """Jobs end; those that came after a job which did not move its pages fail with it."""
        changed = True
        while changed:
            changed = False
            for moved in self.live():
                if any(e.over in (Phase.FAILED, Phase.CANCELLED) for e in moved.after):
                    moved.failed = True
                if moved.end_if_over():
                    assert moved.over is not None
                    self.ends[moved.over] += 1
                    changed = True


def urgency(priority: Priority, deadline_s: float | None) -> Urgency:
    return Urgency(True, priority, math.inf if deadline_s is None else deadline_s)
