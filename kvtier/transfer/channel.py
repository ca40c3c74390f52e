"""One direction of a core: its queue, its window, and what it has moved."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import TransferError
from kvtier.transfer.job import Chunk, Job, JobState, Priority
from kvtier.transfer.order import FairClock, Rank, ReadyQueue, Urgency
from kvtier.transfer.window import Window


@dataclass(slots=True)
class Counters:
    """Jobs and bytes of one direction since the start; each figure is counted on its own.

    issued = done + failed + cancelled + live jobs, and
    submitted = moved + lost + dropped + queued + in-flight bytes.
    """

    issued: int = 0
    """Jobs that were accepted."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    live: int = 0
    chunks: int = 0
    """Chunks that were started."""
    submitted_bytes: int = 0
    moved_bytes: int = 0
    lost_bytes: int = 0
    """Of chunks that failed."""
    dropped_bytes: int = 0
    """Never started, since their job ended before."""
    queued_bytes: int = 0
    in_flight_bytes: int = 0
    waiting_s: float = 0.0
    """From submission to the first chunk's start, summed over the jobs that started."""
    copying_s: float = 0.0
    """From start to end, summed over chunks."""
    late: int = 0
    """DONE after their deadline."""

    def check(self) -> None:
        """Raise TransferError unless what came in went out or is here."""
        jobs = self.done + self.failed + self.cancelled + self.live
        bytes_out = self.moved_bytes + self.lost_bytes + self.dropped_bytes
        if self.issued != jobs:
            raise TransferError(f"{self.issued} jobs came in, {jobs} are accounted for: {self}")
        if self.submitted_bytes != bytes_out + self.queued_bytes + self.in_flight_bytes:
            raise TransferError(f"bytes that came in are not those accounted for: {self}")
        if min(self.queued_bytes, self.in_flight_bytes, self.live) < 0:
            raise TransferError(f"a counter is negative: {self}")


class Channel:
    """What a core keeps per direction. The core says when, this says in which order."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.queue = ReadyQueue()
        self.counters = Counters()
        self._clocks = {priority: FairClock() for priority in Priority}

    def rank(self, job_id: int, urgency: Urgency, num_bytes: int) -> Rank:
        """A place for a job that has `num_bytes` to copy."""
        return Rank(urgency, self._clocks[urgency.priority].enter(num_bytes), job_id)

    def move(self, rank: Rank, urgency: Urgency, num_bytes: int) -> Rank:
        """Another place for a job with `num_bytes` not started; it is in the queue as before."""
        self._clocks[rank.urgency.priority].leave(rank.turn, num_bytes)
        moved = self.rank(rank.job_id, urgency, num_bytes)
        if rank.job_id in self.queue:
            self.queue.put(moved)
        return moved

    def drop(self, rank: Rank, num_bytes: int) -> None:
        """The job never starts its last `num_bytes`."""
        self._clocks[rank.urgency.priority].leave(rank.turn, num_bytes)
        self.counters.queued_bytes -= num_bytes
        self.counters.dropped_bytes += num_bytes

    def has_room(self, rank: Rank, num_bytes: int) -> bool:
        """Whether a chunk of the job at `rank` may start beside those in flight.

        With none in flight it always may: no window can stop a direction for good.
        """
        in_flight = self.counters.in_flight_bytes
        return not rank.urgency.held or in_flight == 0 or self.window.room(in_flight) >= num_bytes

    def start(self, rank: Rank, num_bytes: int, now_s: float) -> None:
        counters = self.counters
        counters.chunks += 1
        counters.queued_bytes -= num_bytes
        counters.in_flight_bytes += num_bytes
        self.window.sent(num_bytes, now_s)
        self._clocks[rank.urgency.priority].serve(num_bytes)

    def end(self, chunk: Chunk, now_s: float, *, moved: bool) -> None:
        counters = self.counters
        counters.in_flight_bytes -= chunk.num_bytes
        counters.copying_s += now_s - chunk.issued_s
        if moved:
            counters.moved_bytes += chunk.num_bytes
        else:
            counters.lost_bytes += chunk.num_bytes
        self.window.ended(chunk.num_bytes, chunk.issued_s, now_s)

    def count_start(self, num_bytes: int) -> None:
        """A job of `num_bytes` comes in."""
        counters = self.counters
        counters.issued += 1
        counters.live += 1
        counters.submitted_bytes += num_bytes
        counters.queued_bytes += num_bytes

    def count_wait(self, waited_s: float) -> None:
        """A job gets its first chunk."""
        self.counters.waiting_s += waited_s

    def count_end(self, job: Job) -> None:
        """The job has ended, and says how."""
        counters = self.counters
        counters.live -= 1
        if job.state is JobState.DONE:
            counters.done += 1
            if job.deadline_s is not None and job.ended_s is not None:
                counters.late += job.ended_s > job.deadline_s
        elif job.state is JobState.FAILED:
            counters.failed += 1
        else:
            counters.cancelled += 1
