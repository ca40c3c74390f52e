"""Clients of one transfer core: N jobs at all times, and now and then an urgent one of one page.

Whoever drives the core, on a modelled link or over real memory, gives these clients the time and
tells them of jobs that ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.ids import Direction
from kvtier.transfer.chunks import Geometry
from kvtier.transfer.core import TransferCore
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Chunk, Job, JobState, Priority
from kvtier.transfer.window import TransferWindow, Window, WindowSettings

WINDOWS = ("aimd", "none")
_URGENT_PAGES = 8192
"""Urgent jobs that may be under way at once: no window makes them wait in thousands."""


@dataclass(frozen=True)
class Load:
    """What the clients of a core do."""

    page_bytes: int
    chunk_pages: int
    job_pages: int
    num_jobs: Mapping[Direction, int]
    window: str

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_pages * self.page_bytes

    def core(self) -> TransferCore:
        """An empty core whose pools are as large as these jobs need."""
        num_pages = _URGENT_PAGES + sum(self.num_jobs.values()) * self.job_pages
        geometry = Geometry(num_pages, num_pages, (self.page_bytes,))
        windows = {direction: self._window() for direction in Direction}
        return TransferCore(geometry, chunk_bytes=self.chunk_bytes, windows=windows)

    def _window(self) -> Window:
        if self.window == "none":
            return FixedWindow()
        return TransferWindow(WindowSettings(chunk_bytes=self.chunk_bytes))


@dataclass
class Clients:
    """The jobs of one core. Times are the driver's, s; nothing counts before `measure_from_s`."""

    load: Load
    core: TransferCore
    measure_from_s: float
    measure_until_s: float
    latencies_s: list[float] = field(default_factory=list)
    """Of urgent jobs that were submitted within the measured time."""
    moved_bytes: int = 0
    """Of chunks that ended within the measured time."""
    chunk_s: list[float] = field(default_factory=list)
    """How long each whole chunk among them took, from the end of the chunk before it."""

    def __post_init__(self) -> None:
        self._last_end_s = dict.fromkeys(Direction, -math.inf)
        self._free = deque(range(_URGENT_PAGES))
        self._first_page: dict[int, int] = {}

    def start(self, now_s: float) -> None:
        """Submit the first `num_jobs` of each direction."""
        directions = [way for way, count in self.load.num_jobs.items() for _ in range(count)]
        for place, direction in enumerate(directions):
            self._submit(direction, _URGENT_PAGES + place * self.load.job_pages, now_s)

    def ask(self, now_s: float) -> None:
        """Submit an urgent page, host to device."""
        page = self._free.popleft()
        job = Job(Direction.H2D, [page], [page], priority=Priority.URGENT)
        self.core.submit(job, now_s)

    def ended(self, chunk: Chunk, now_s: float) -> None:
        """A chunk was copied: count it, and replace the jobs that ended by it."""
        if self.measure_from_s <= now_s < self.measure_until_s:
            self.moved_bytes += chunk.num_bytes
            if chunk.num_bytes == self.load.chunk_bytes:
                begun_s = max(chunk.issued_s, self._last_end_s[chunk.direction])
                self.chunk_s.append(now_s - begun_s)
        self._last_end_s[chunk.direction] = now_s
        self._replace(self.core.ended(chunk, now_s), now_s)

    def _replace(self, jobs: Iterable[Job], now_s: float) -> None:
        for job in jobs:
            assert job.state is JobState.DONE, f"{job}: {job.error}"
            assert job.submitted_s is not None
            if job.priority is Priority.URGENT:
                self._free.append(int(job.source_pages[0]))
                if self.measure_from_s <= job.submitted_s < self.measure_until_s:
                    self.latencies_s.append(now_s - job.submitted_s)
            elif now_s < self.measure_until_s:
                self._submit(job.direction, self._first_page.pop(job.id), now_s)

    def _submit(self, direction: Direction, first_page: int, now_s: float) -> None:
        pages = np.arange(first_page, first_page + self.load.job_pages, dtype=np.int32)
        priority = Priority.NORMAL if direction is Direction.H2D else Priority.BACKGROUND
        job = Job(direction, pages, pages, priority=priority)
        self.core.submit(job, now_s)
        self._first_page[job.id] = first_page

    @property
    def goodput_bytes_per_s(self) -> float:
        return self.moved_bytes / (self.measure_until_s - self.measure_from_s)


@dataclass(frozen=True)
class Outcome:
    """What a run showed: its goodput, and how long each urgent page and each chunk took."""

    load: Load
    goodput_bytes_per_s: float
    latencies_s: list[float]
    chunk_s: list[float]

    @classmethod
    def of(cls, clients: Sequence[Clients], asking: Sequence[Clients] | None = None) -> Outcome:
        """All of them together; latencies of `asking` alone, if given."""
        return cls(
            clients[0].load,
            sum(each.goodput_bytes_per_s for each in clients),
            [latency for each in asking or clients for latency in each.latencies_s],
            [chunk_s for each in clients for chunk_s in each.chunk_s],
        )


def percentile_us(latencies_s: Sequence[float], percent: float) -> float:
    """A time that was measured, none in between, us."""
    return float(np.percentile(latencies_s, percent, method="higher")) * 1e6
