"""The order in which jobs of one direction get their chunks."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvtier.transfer.job import Priority


class Urgency(NamedTuple):
    """What a job hands down to the jobs that it waits for; less is more urgent.

    `held` is False where the job passes the window: an URGENT job waits for it.
    """

    held: bool
    priority: Priority
    deadline_s: float


class Rank(NamedTuple):
    """A job's place; the lowest goes first. The id makes it total."""

    urgency: Urgency
    turn: float
    job_id: int


class FairClock:
    """Turns for jobs of one priority, so that a small one does not wait for a large one.

    A job's turn is when it would end if all jobs shared the link evenly (in bytes that each of them
    got by then); jobs then go one after the other in order of their turns. None ends later than it
    would by sharing, equal ones go first come first served, and a large one cannot starve: turns of
    newcomers grow with every byte. Source: Friedman and Henderson, "Fairness and efficiency in web
    server protocols", SIGMETRICS 2003 (FSP).
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._turns: list[float] = []  # ascending; of all jobs that would not have ended yet

    def enter(self, num_bytes: int) -> float:
        """The turn of a job that has `num_bytes` to copy."""
        turn = self._now + num_bytes
        insort(self._turns, turn)
        return turn

    def leave(self, turn: float, num_bytes: int) -> None:
        """A job with `num_bytes` not issued ends early, or is of another priority now."""
        at = bisect_left(self._turns, turn)
        if at < len(self._turns) and self._turns[at] == turn:
            del self._turns[at]
        # What it would have got, but others were issued instead: without this, turns of jobs that
        # are long over would pile up.
        self.serve(max(0.0, num_bytes - max(0.0, turn - self._now)))

    def serve(self, num_bytes: float) -> None:
        """So many bytes of these jobs have been issued."""
        turns, left, ended = self._turns, num_bytes, 0
        while ended < len(turns):
            sharing = len(turns) - ended
            until_next = (turns[ended] - self._now) * sharing
            if left < until_next:
                self._now += left / sharing
                break
            left -= until_next
            self._now = turns[ended]
            ended += 1
        if ended:
            del turns[:ended]


class ReadyQueue:
    """Job ids by rank; ranks change. Entries that no longer count are skipped, and cleared out."""

    def __init__(self) -> None:
        self._heap: list[Rank] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._ranks

    def put(self, rank: Rank) -> None:
        """Add the job, or move it to this rank."""
        self._ranks[rank.job_id] = rank
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = list(self._ranks.values())
            heapify(self._heap)

    def discard(self, job_id: int) -> None:
        """Take the job out, if it is in."""
        self._ranks.pop(job_id, None)

    def first(self) -> Rank | None:
        """The lowest rank; None when nobody is in."""
        while self._heap:
            rank = self._heap[0]
            if self._ranks.get(rank.job_id) is rank:
                return rank
            heappop(self._heap)
        return None
