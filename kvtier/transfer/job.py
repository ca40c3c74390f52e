"""A transfer job: which pages go where, how urgent that is, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.layers import LayerProgress

Pages = npt.NDArray[np.int32]
PageIds = Sequence[int] | npt.NDArray[np.integer]

_Kind = TypeVar("_Kind", bound=Enum)

_MAX_PAGE = (1 << 31) - 1
_INT32 = np.dtype(np.int32)
_FEW = 256  # up to here a set of ids is made faster than an array
_SPARSE = 64  # bytes of marks per id, above which sorting the ids is faster


class JobState(StrEnum):
    """QUEUED until its first chunk starts, then IN_FLIGHT; the other three are how it ended."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (JobState.QUEUED, JobState.IN_FLIGHT)


class Priority(IntEnum):
    """Lower goes first. URGENT: a request waits for it. NORMAL: a promotion ahead of time.

    BACKGROUND: a write-back.
    """

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


class Ready(Protocol):
    """What must have happened before pages are touched, in the terms of a backend.

    D2H: the write of the source pages by compute; H2D: the last read of the target pages. A
    backend on threads calls `wait` before the first byte; one on streams lets its stream wait for
    it. Whatever comes later in the same direction waits as well: that is stream order.
    """

    def wait(self) -> object:
        """Return when it has happened; raise where it never will."""


class Job:
    """Pages that move together: page `source_pages[i]` to page `target_pages[i]`.

    Source and target are int32[n], n >= 1, copies of their own that cannot be written. A page may
    be read twice, and is written once. `deadline_s`, on the clock of whoever drives the core,
    orders jobs of the same priority; a job that misses it goes on. `after` are earlier jobs that
    its room depends on: it starts when all of them are DONE, and fails if one is not; they become
    as urgent as it is. `layerwise` copies layer after layer and tells of each in `layers`.

    What follows is written by the core alone: `id`, `owner`, `state`, `error` (a TransferError once
    FAILED), `submitted_s`, `started_s` and `ended_s` (None until then), and `pages_done`, the pages
    whose bytes have all arrived. A job that is FAILED or CANCELLED has published nothing, whatever
    `pages_done` says.

    Raises TransferError for ids that are no integers of one dimension in [0, 2^31), for none, for
    different numbers of them, for a target that occurs twice, for a direction, priority or deadline
    that is none, and for `layerwise` device to host.
    """

    # Before it is submitted.
    id: int = -1
    owner: object = None
    num_bytes: int = 0
    state: JobState = JobState.QUEUED
    error: TransferError | None = None
    submitted_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    pages_done: int = 0
    layers: LayerProgress | None = None
    _resolved: bool = False
    _future: JobFuture | None = None

    def __init__(
        self,
        direction: Direction,
        source_pages: PageIds,
        target_pages: PageIds,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
        after: Sequence[Job] = (),
        layerwise: bool = False,
        ready: Ready | None = None,
    ) -> None:
        # Calling an enum, or a function, for what is right already costs more than asking here.
        if type(direction) is not Direction:
            direction = member(Direction, "direction", direction)
        if type(priority) is not Priority:
            priority = member(Priority, "priority", priority)
        self.direction = direction
        self.source_pages = _owned("source", source_pages)
        self.target_pages = _owned("target", target_pages)
        self.num_pages = self.source_pages.size
        _check_shapes(self.source_pages, self.target_pages)
        if layerwise and self.direction is not Direction.H2D:
            raise TransferError("layerwise copies go from host to device; leave it out for d2h")
        self.priority = priority
        self.deadline_s = checked_deadline(deadline_s)
        self.after = tuple(after)
        self.layerwise = layerwise
        self.ready = ready
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<job {self.id}: {self.direction}, {self.num_pages} pages, {self.state}>"

    @property
    def future(self) -> JobFuture:
        """Resolves to None when DONE, to `error` when FAILED, and is cancelled when CANCELLED."""
        with self._lock:
            if self._future is None:
                self._future = JobFuture()
                if self._resolved:
                    self._settle(self._future)
            return self._future

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio  # 30 ms to import: who awaits has it already

        return asyncio.wrap_future(self.future).__await__()

    def resolve(self) -> None:
        """Let the future know that the job has ended; without the locks of whoever calls.

        Whoever drives the core calls it for each job that ended, once or, after an interrupt,
        again: callbacks of the future run in here.
        """
        with self._lock:
            self._resolved = True
            future = self._future
        if future is not None and not future.done():
            self._settle(future)

    def _settle(self, future: JobFuture) -> None:
        if self.state is JobState.CANCELLED:
            future.end_cancelled()
        elif self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(None)


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a job that a backend copies in one go.

    `source_pages` and `target_pages` are views of the job's, from `first_page` on. Segments
    [first_segment, first_segment + num_segments) are copied, which are layers [first_layer,
    end_layer): all of them unless the job is layer-wise.
    """

    job: Job
    first_page: int
    source_pages: Pages
    target_pages: Pages
    first_segment: int
    num_segments: int
    first_layer: int
    end_layer: int
    num_bytes: int
    issued_s: float
    begun: bool = False
    """Set by the backend before the first byte."""
    ended: bool = False
    """Set by the core."""

    @property
    def direction(self) -> Direction:
        return self.job.direction


class JobFuture(Future[None]):
    """The future of a job. Nobody can cancel it: `TransferEngine.cancel` cancels the job.

    A future that reads "cancelled" while the copy goes on would let pages be reused under it; so a
    time-out in asyncio, too, ends the waiting and not the job.
    """

    def cancel(self) -> bool:
        """False: cancel the job instead."""
        return False

    def end_cancelled(self) -> None:
        """The job has ended CANCELLED."""
        super().cancel()
        self.set_running_or_notify_cancel()


def member(kind: type[_Kind], name: str, value: object) -> _Kind:
    """The value as one of its kind. Raises TransferError where it is none."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise TransferError(f"{name}={value!r}; pass one of {known}") from None


def checked_deadline(deadline_s: float | None) -> float | None:
    """The deadline. Raises TransferError where it cannot be ordered."""
    if deadline_s is not None and math.isnan(deadline_s):
        raise TransferError("deadline_s is not a number; pass seconds of the clock, or None")
    return deadline_s


def _owned(name: str, given: PageIds) -> Pages:
    """A copy of the ids as int32[n] that nobody writes to."""
    try:
        ids = np.array(given)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise TransferError(f"{name} pages make no array of one dimension: {reason}") from error
    if ids.ndim != 1:
        raise TransferError(f"{name} pages have shape {ids.shape}; pass one dimension")
    if ids.size == 0:
        raise TransferError(f"a job needs pages, and there are no {name} pages; submit none")
    if ids.dtype is not _INT32:  # what is equal but another object is narrowed to it
        ids = _narrowed(name, ids)
    ids.setflags(write=False)
    return ids


def _narrowed(name: str, ids: npt.NDArray[Any]) -> Pages:
    if ids.dtype.kind not in "iu":
        raise TransferError(f"{name} pages have dtype {ids.dtype}; pass integers")
    if int(ids.min()) < 0 or int(ids.max()) > _MAX_PAGE:
        wrong = ids[(ids < 0) | (ids > _MAX_PAGE)][0]
        raise TransferError(f"{name} page {wrong} is outside every pool; ids are int32 from 0 on")
    return ids.astype(np.int32)


def _check_shapes(source: Pages, target: Pages) -> None:
    if source.size != target.size:
        raise TransferError(
            f"{source.size} source pages and {target.size} target pages; pass as many of each"
        )
    if not _are_unique(target):
        ordered = np.sort(target)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        raise TransferError(f"target page {twice[0]} occurs twice; a page can be written once")


def _are_unique(ids: Pages) -> bool:
    if ids.size <= _FEW:
        return len(set(ids.tolist())) == ids.size
    span = int(ids.view(np.uint32).max()) + 1
    if span > _SPARSE * ids.size:
        return np.unique(ids).size == ids.size
    seen = np.zeros(span, np.bool_)
    seen[ids] = True
    return int(np.count_nonzero(seen)) == ids.size
