"""A core with small pools, jobs for it, and a driver that ends chunks by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.chunks import Geometry
from kvtier.transfer.core import TransferCore
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Chunk, Job, Priority

LAYER_BYTES = (30, 50, 20)
PAGE_BYTES = sum(LAYER_BYTES)
NUM_PAGES = 1000
D2H, H2D = Direction


class Scene:
    """A core, the time, and the chunks in flight in the order of their starts."""

    def __init__(
        self, *, chunk_pages: int = 2, window_pages: int = 1000, num_pages: int = NUM_PAGES
    ) -> None:
        geometry = Geometry(num_pages, num_pages, LAYER_BYTES, (2, 1, 3))
        windows = {direction: FixedWindow(window_pages * PAGE_BYTES) for direction in Direction}
        self.core = TransferCore(geometry, chunk_bytes=chunk_pages * PAGE_BYTES, windows=windows)
        self.now_s = 0.0
        self.in_flight: list[Chunk] = []
        self.ended: list[Job] = []
        self._next_page = 0

    def pages(self, count: int) -> range:
        """Pages that no other call has returned."""
        self._next_page += count
        return range(self._next_page - count, self._next_page)

    def job(
        self,
        direction: Direction = H2D,
        pages: int | Sequence[int] = 1,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
        after: Sequence[Job] = (),
        layerwise: bool = False,
    ) -> Job:
        """Submit a job from pages to the same pages of the other tier; new ones for a count."""
        ids = self.pages(pages) if isinstance(pages, int) else pages
        job = Job(
            direction,
            ids,
            ids,
            priority=priority,
            deadline_s=deadline_s,
            after=after,
            layerwise=layerwise,
        )
        self.core.submit(job, self.now_s)
        self.ended += self.core.take_ended()
        self.core.check_integrity()
        return job

    def issue(self) -> list[Chunk]:
        chunks = self.core.issue(self.now_s)
        self.in_flight += chunks
        self.core.check_integrity()
        return chunks

    def end(self, chunk: Chunk, error: Exception | None = None) -> list[Job]:
        self.in_flight.remove(chunk)
        ended = self.core.ended(chunk, self.now_s, error)
        self.ended += ended
        self.core.check_integrity()
        return ended

    def cancel(self, job: Job) -> bool:
        cancelled = self.core.cancel(job, self.now_s)
        self.ended += self.core.take_ended()
        self.core.check_integrity()
        return cancelled

    def run(self, each: Callable[[Chunk], object] = lambda chunk: None) -> list[Chunk]:
        """Start and end everything, oldest chunk first; the chunks in the order of their starts."""
        started = self.issue()
        while self.in_flight:
            each(self.in_flight[0])
            self.end(self.in_flight[0])
            started += self.issue()
        return started

    def refuses(self, match: str, job: Job) -> None:
        """The job is not accepted, and nothing is changed by the attempt."""
        before = str(self.core.counters)
        with pytest.raises(TransferError, match=match) as caught:
            self.core.submit(job, self.now_s)
        assert "\n" not in str(caught.value)
        assert (str(self.core.counters), job.id) == (before, -1)
        self.core.check_integrity()


def order(chunks: Sequence[Chunk]) -> list[Job]:
    """The jobs of the chunks, each time that it changes."""
    jobs = [chunk.job for chunk in chunks]
    return [job for at, job in enumerate(jobs) if at == 0 or jobs[at - 1] is not job]
