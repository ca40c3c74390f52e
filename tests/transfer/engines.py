"""Engines over small pools, for tests that set the scene themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import Any

from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.faults import FaultyBackend
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Job

from .gate import Gate
from .scene import PAGE_BYTES, Bytes, Pools, pattern, take

LONG_S = 30
"""No test waits so long; it only bounds one that hangs."""


@dataclass
class Scene:
    """Pools, a gate before the copying, and an engine."""

    pools: Pools
    gate: Gate
    engine: TransferEngine
    generation: int = 0

    def fill(self, direction: Direction, num_pages: int) -> tuple[list[int], Bytes]:
        """Taken source pages with bytes of their own."""
        side = self.pools.source(direction)
        pages = take(side, num_pages)
        content = pattern(0, self.generation, num_pages)
        self.generation += 1
        side.write(pages, content)
        return pages, content

    def copy(self, direction: Direction, num_pages: int, **how: Any) -> tuple[Job, Bytes]:
        """A job from fresh pages to fresh pages, and the bytes that its targets shall hold."""
        sources, content = self.fill(direction, num_pages)
        targets = take(self.pools.target(direction), num_pages)
        return self.engine.submit(direction, sources, targets, **how), content

    def arrived(self, job: Job) -> Bytes:
        return self.pools.target(job.direction).read(job.target_pages.tolist())

    def let_all(self) -> None:
        """Chunks end one after the other, oldest first, until none is in flight."""
        while self.gate.waiting:
            self.gate.let(0)

    def metric(self, name: str, direction: Direction, outcome: str | None = None) -> float:
        wanted = {"direction": str(direction)} | ({"outcome": outcome} if outcome else {})
        found = [
            value
            for full, labels, value in self.engine.metrics()
            if full == f"kvtier_transfer_{name}" and wanted.items() <= dict(labels).items()
        ]
        assert len(found) == 1, f"{name} is there {len(found)} times"
        return found[0]


@contextmanager
def scene(
    device_pages: int = 16,
    host_pages: int = 16,
    *,
    chunk_pages: int = 1,
    window_pages: int | None = None,
    gated: bool = True,
    **faults: Any,
) -> Iterator[Scene]:
    """An engine whose chunks wait at the gate, or pass at once where it is not `gated`.

    `window_pages` bounds the pages in flight per direction. Left well, no job is live, every copy
    that went on has ended, and nothing wrote where it must not.
    """
    pools = Pools(device_pages, host_pages)
    backend = CpuBackend(pools.device_pool, pools.host_pool, CpuCopy(num_threads=1))
    gate = Gate(FaultyBackend(backend, **faults))
    gate.open = not gated
    window_bytes = 1 << 40 if window_pages is None else window_pages * PAGE_BYTES
    windows = {direction: FixedWindow(window_bytes) for direction in Direction}
    engine = TransferEngine(gate, chunk_bytes=chunk_pages * PAGE_BYTES, windows=windows)
    try:
        yield Scene(pools, gate, engine)
        engine.check_integrity()
        pools.compare_gaps()
        assert not gate.wrong
    finally:
        gate.open_wide()
        engine.close()
        pools.close()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """All begin at once; what one of them raises is raised here."""
    ready = Barrier(count)

    def run(number: int) -> None:
        ready.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, number) for number in range(count)]:
            future.result(4 * LONG_S)
