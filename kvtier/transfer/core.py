"""Which chunk of which job is copied next: the transfer engine without clock, threads or bytes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.channel import Channel, Counters
from kvtier.transfer.chunks import Cutter, Geometry, Piece
from kvtier.transfer.integrity import check_integrity
from kvtier.transfer.job import (
    Chunk,
    Job,
    JobState,
    Pages,
    Priority,
    checked_deadline,
    member,
)
from kvtier.transfer.layers import LayerProgress
from kvtier.transfer.live import Live, closure
from kvtier.transfer.order import Urgency
from kvtier.transfer.usage import READ, WRITE, Index, PageUse
from kvtier.transfer.window import Window

_UINT32, _INTP = np.dtype(np.uint32), np.dtype(np.intp)
_NO_DEADLINE = {priority: Urgency(True, priority, math.inf) for priority in Priority}
_LOST = (JobState.FAILED, JobState.CANCELLED)


class TransferCore:
    """Jobs in, chunks out; whoever drives it copies the chunks and says when they ended.

    Jobs are cut into chunks of at most `chunk_bytes`. In each direction the next chunk is that of
    the first job by (passes the window, priority, deadline, turn, id); see FairClock for turns. It
    starts where its window has room for it, or where nothing is in flight. A job whose `after` are
    not all DONE waits, and each of those, and those that they wait for, gets its priority and
    deadline if these are more urgent; where an URGENT job waits, they pass the window: a copy up is
    never held up behind write-backs that its room depends on. That stays if the job is cancelled.

    Law 2: a job's pages are in use from `submit` until it ends, and it ends only when none of its
    chunks is in flight. A job that shares a page with another live one, other than to read it,
    must have that one in its `after` (or in theirs, and so on): it is refused otherwise.

    One thread at a time. Every job that ended is handed out once, by `ended` or `take_ended`.
    Times are in seconds of one clock that never goes back.
    """

    def __init__(
        self, geometry: Geometry, *, chunk_bytes: int, windows: Mapping[Direction, Window]
    ) -> None:
        missing = [direction for direction in Direction if direction not in windows]
        if missing:
            raise TransferError(f"no window for {', '.join(missing)}; FixedWindow() has no bound")
        self.geometry = geometry
        self.chunk_bytes = chunk_bytes
        self._cutter = Cutter(geometry, chunk_bytes)
        self._channels = {direction: Channel(windows[direction]) for direction in Direction}
        device = PageUse("device", geometry.device_pages)
        host = PageUse("host", geometry.host_pages)
        self._uses = {Direction.D2H: (device, host), Direction.H2D: (host, device)}
        self._live: dict[int, Live] = {}
        self._next_id = 0
        self._owner = object()
        self._ended: list[Job] = []

    @property
    def counters(self) -> Mapping[Direction, Counters]:
        """Of each direction; live objects, to be read only."""
        return {direction: channel.counters for direction, channel in self._channels.items()}

    @property
    def num_live(self) -> int:
        """Jobs that have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Jobs that a window, or another job of their direction, keeps from their next chunk."""
        return sum(len(channel.queue) for channel in self._channels.values())

    def in_flight_bytes(self, direction: Direction) -> int:
        return self._channels[direction].counters.in_flight_bytes

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes of live jobs that no chunk has been started for."""
        return self._channels[direction].counters.queued_bytes

    def window(self, direction: Direction) -> Window:
        return self._channels[direction].window

    def live_jobs(self) -> list[Job]:
        """In the order of their submission."""
        return [live.job for live in self._live.values()]

    def submit(self, job: Job, now_s: float) -> None:
        """Accept the job; `issue` starts it.

        FAILED at once where a job of its `after` ended otherwise than DONE. Raises TransferError,
        with nothing changed, for a page outside its pool or in another live job (see the class),
        for a job that was submitted before, and for one in `after` that was not submitted here.
        """
        if job.owner is not None:
            raise TransferError(f"{job} was submitted before; make another one")
        blockers, lost = self._blockers(job.after) if job.after else ({}, [])
        live = self._admit(job, blockers)
        job.submitted_s = now_s
        if lost:
            self._fail(live, lost[0])
            self._finish(live, now_s)
        elif blockers:
            self._hand_down(live)
        else:
            self._channels[job.direction].queue.put(live.rank)

    def raise_priority(self, job: Job, priority: Priority, deadline_s: float | None = None) -> None:
        """Make a live job, and those it waits for, as urgent as that; never less urgent.

        For a promotion that a request waits for by now. A job that has ended stays as it is.
        """
        priority, deadline_s = member(Priority, "priority", priority), checked_deadline(deadline_s)
        live = self._own(job)
        if live is not None:
            job.priority = min(job.priority, priority)
            self._hasten(live, _urgency(priority, deadline_s))
            self._hand_down(live)

    def cancel(self, job: Job, now_s: float) -> bool:
        """End the job CANCELLED: at once, or when its chunks in flight have ended.

        It gets no further chunk. False where it has ended, or is about to end FAILED.
        """
        live = self._own(job)
        if live is None or live.ending is JobState.FAILED:
            return False
        self._stop(live, JobState.CANCELLED)
        if not live.chunks_in_flight:
            self._finish(live, now_s)
        return True

    def issue(self, now_s: float) -> list[Chunk]:
        """The chunks to start now, in this order. They are in flight until `ended` is told."""
        chunks: list[Chunk] = []
        for channel in self._channels.values():
            while (rank := channel.queue.first()) is not None:
                live = self._live[rank.job_id]
                piece = live.piece
                assert piece is not None, f"{live.job} is queued and has nothing left to copy"
                num_bytes = self._cutter.num_bytes(piece)
                if not channel.has_room(rank, num_bytes):
                    break
                chunks.append(self._start(live, piece, num_bytes, now_s))
        return chunks

    def ended(self, chunk: Chunk, now_s: float, error: Exception | None = None) -> list[Job]:
        """A chunk was copied, or failed and may have written anything; the jobs that ended.

        After an error its job gets no further chunk, and ends FAILED with its last chunk in
        flight, unless it was cancelled before. Raises TransferError for a chunk not in flight.
        """
        live = self._live.get(chunk.job.id)
        if chunk.ended or live is None or live.job is not chunk.job:
            raise TransferError(f"a chunk of {chunk.job} ended, and it was not in flight")
        chunk.ended = True
        live.chunks_in_flight -= 1
        live.bytes_in_flight -= chunk.num_bytes
        self._channels[chunk.direction].end(chunk, now_s, moved=error is None)
        if error is None:
            _arrived(live.job, chunk)
        elif live.ending is None:
            live.job.error = _failure(live.job, f"a chunk failed: {error}", error)
            self._stop(live, JobState.FAILED)
        if not live.chunks_in_flight and live.piece is None:
            self._finish(live, now_s)
        return self.take_ended()

    def take_ended(self) -> list[Job]:
        """Jobs that ended and were not handed out yet, in the order in which they ended."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Raise TransferError unless pages, bytes and jobs add up. O(pages of the pools)."""
        check_integrity(self._channels, self._uses, self._live)

    def _blockers(self, after: Sequence[Job]) -> tuple[dict[int, Live], list[Job]]:
        """Those that are live, by id, and those that ended otherwise than DONE."""
        for other in after:
            if not isinstance(other, Job):
                raise TransferError(f"`after` has {other!r}; pass the jobs that `submit` returned")
            if other.owner is not self._owner:
                raise TransferError(f"{other} in `after` was not submitted here; submit it before")
        live = {other.id: self._live[other.id] for other in after if not other.state.ended}
        return live, [other for other in after if other.state in _LOST]

    def _admit(self, job: Job, blockers: dict[int, Live]) -> Live:
        """Check the job's pages and take them; the job is live from here on."""
        reads, writes = self._uses[job.direction]
        source, target = _indices(job.source_pages), _indices(job.target_pages)
        source_users, target_users = reads.of(source), writes.of(target)
        if source_users is not None:
            reads.check_readable(source, self._earlier(reads, blockers))
        if target_users is not None:
            writes.check_writable(target, self._earlier(writes, blockers))
        reads.add(source, source_users, READ)
        writes.add(target, target_users, WRITE)
        job.id, job.owner = self._next_id, self._owner
        self._next_id += 1
        num_bytes = job.num_bytes = job.num_pages * self._cutter.page_bytes
        if job.layerwise:
            job.layers = LayerProgress(self.geometry.num_layers, job.num_pages)
        channel = self._channels[job.direction]
        channel.count_start(num_bytes)
        rank = channel.rank(job.id, _urgency(job.priority, job.deadline_s), num_bytes)
        pieces = self._cutter.pieces(job)
        live = Live(
            job,
            source,
            target,
            source_users,
            target_users,
            pieces,
            next(pieces),
            rank,
            num_bytes,
            blockers,
        )
        for blocker in blockers.values():
            blocker.heirs[job.id] = live
        self._live[job.id] = live
        return live

    def _earlier(
        self, use: PageUse, blockers: Mapping[int, Live]
    ) -> Iterator[tuple[Index, np.int64]]:
        """What the jobs that end before one with these blockers do to a tier."""
        for live in closure(blockers.values()):
            reads, _ = self._uses[live.job.direction]
            yield (live.source, READ) if use is reads else (live.target, WRITE)

    def _own(self, job: Job) -> Live | None:
        """What is kept of it; None once it has ended."""
        if not isinstance(job, Job) or job.owner is not self._owner:
            raise TransferError(f"{job} was not submitted here; ask the engine that it belongs to")
        return self._live.get(job.id)

    def _start(self, live: Live, piece: Piece, num_bytes: int, now_s: float) -> Chunk:
        """The job's next chunk, in flight."""
        job, channel = live.job, self._channels[live.job.direction]
        if job.state is JobState.QUEUED:
            job.state, job.started_s = JobState.IN_FLIGHT, now_s
            channel.count_wait(now_s - (job.submitted_s or 0.0))
        chunk = self._cutter.chunk(job, piece, num_bytes, now_s)
        channel.start(live.rank, num_bytes, now_s)
        live.chunks_in_flight += 1
        live.bytes_left -= num_bytes
        live.bytes_in_flight += num_bytes
        live.piece = next(live.pieces, None)
        if live.piece is None:
            channel.queue.discard(job.id)
        return chunk

    def _stop(self, live: Live, ending: JobState) -> None:
        """No further chunk; it ends so, unless it was stopped before."""
        if live.ending is not None:
            return
        live.ending, live.piece = ending, None
        channel = self._channels[live.job.direction]
        channel.queue.discard(live.job.id)
        if live.bytes_left:
            channel.drop(live.rank, live.bytes_left)
            live.bytes_left = 0

    def _fail(self, live: Live, lost: Job) -> None:
        live.job.error = _failure(live.job, f"its room never came: {lost}", lost.error)
        self._stop(live, JobState.FAILED)

    def _finish(self, live: Live, now_s: float) -> None:
        """The job ends, and with it those that wait for it unless it is DONE."""
        self._end(live, now_s)
        if live.ending is None:
            for heir in live.heirs.values():
                del heir.blockers[live.job.id]
                if not heir.blockers:
                    self._channels[heir.job.direction].queue.put(heir.rank)
        elif live.heirs:
            self._fail_heirs(live, now_s)

    def _fail_heirs(self, live: Live, now_s: float) -> None:
        ended = deque([live])
        while ended:
            live = ended.popleft()
            for heir in [*live.heirs.values()]:
                self._fail(heir, live.job)
                self._end(heir, now_s)
                ended.append(heir)

    def _end(self, live: Live, now_s: float) -> None:
        job = live.job
        job.state, job.ended_s = live.ending or JobState.DONE, now_s
        job.after = ()  # a chain of jobs must not keep all of them alive
        if job.layers is not None and job.state is not JobState.DONE:
            job.layers.end(str(job.error or job))
        reads, writes = self._uses[job.direction]
        reads.remove(live.source, live.source_users, READ)
        writes.remove(live.target, live.target_users, WRITE)
        self._channels[job.direction].count_end(job)
        for blocker in live.blockers.values():
            del blocker.heirs[job.id]
        del self._live[job.id]
        self._ended.append(job)

    def _hand_down(self, live: Live) -> None:
        """Make those that the job waits for as urgent as it is, and those that they wait for."""
        waiting = [live]
        while waiting:
            heir = waiting.pop()
            priority = heir.rank.urgency.priority
            urgency = heir.rank.urgency._replace(held=priority is not Priority.URGENT)
            waiting += [other for other in heir.blockers.values() if self._hasten(other, urgency)]

    def _hasten(self, live: Live, urgency: Urgency) -> bool:
        """Whether that made it more urgent."""
        if not live.bytes_left or urgency >= live.rank.urgency:
            return False
        channel = self._channels[live.job.direction]
        live.rank = channel.move(live.rank, urgency, live.bytes_left)
        return True


def _indices(pages: Pages) -> Index:
    """As numpy wants them for speed; a negative id is beyond every pool, not its last page."""
    return pages.view(_UINT32).astype(_INTP)


def _urgency(priority: Priority, deadline_s: float | None) -> Urgency:
    if deadline_s is None:
        return _NO_DEADLINE[priority]
    return Urgency(True, priority, deadline_s)


def _failure(job: Job, reason: str, cause: Exception | None) -> TransferError:
    line = " ".join(reason.split())  # one line, whatever the cause has to say
    error = TransferError(f"job {job.id} ({job.direction}, {job.num_pages} pages): {line}")
    error.__cause__ = cause
    return error


def _arrived(job: Job, chunk: Chunk) -> None:
    if job.layers is None:
        job.pages_done += chunk.source_pages.size
    else:
        pages = slice(chunk.first_page, chunk.first_page + chunk.source_pages.size)
        job.pages_done += job.layers.arrived(range(chunk.first_layer, chunk.end_layer), pages)
