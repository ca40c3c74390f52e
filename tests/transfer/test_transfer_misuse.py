"""What the engine refuses: one line that says what is wrong, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError, KvtierError, TransferError
from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.memory.host_pool import HostPool
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import JobState, Priority

from .engines import Scene, scene
from .scene import PAGE_BYTES, Pools

D2H, H2D = Direction.D2H, Direction.H2D


@contextmanager
def refused(s: Scene, match: str) -> Iterator[None]:
    """A TransferError in one line; no counter, page or chunk has changed."""
    before, chunks = s.engine.metrics(), len(s.gate.waiting)
    with pytest.raises(TransferError, match=match) as raised:
        yield
    assert "\n" not in str(raised.value)
    assert s.engine.metrics() == before
    assert len(s.gate.waiting) == chunks
    s.engine.check_integrity()


WRONG_PAGES: dict[str, tuple[Any, Any, str]] = {
    "none": ([], [], "no source pages"),
    "a target twice": ([0, 1], [3, 3], "target page 3 occurs twice"),
    "more of one": ([0, 1], [0], "2 source pages and 1 target"),
    "outside": ([0], [99], "page 99 is outside"),
    "just outside": ([16], [0], "page 16 is outside"),
    "negative": ([-1], [0], "page -1 is outside"),
    "negative target": ([0], [-1], "page -1 is outside"),
    "negative int32": (np.array([-1], np.int32), [0], "page -1 is outside"),
    "negative int32 target": ([0], np.array([-16], np.int32), "page -16 is outside"),
    "beyond int32": ([0], [1 << 31], "outside"),
    "beyond int64": ([0], [1 << 63], "outside|integer"),
    "far beyond": ([0], [1 << 80], "outside|integer"),
    "fractions": ([0.5], [0], "integers"),
    "bools": ([True], [0], "integers"),
    "text": (["0"], [0], "integers"),
    "nothing": (None, [0], "dimension|integers"),
    "two dimensions": ([[0]], [[0]], "one dimension"),
    "ragged": ([[0], [1, 2]], [0], "one dimension"),
}


@pytest.mark.parametrize("name", WRONG_PAGES)
@pytest.mark.parametrize("direction", Direction)
def test_pages_that_make_no_job_are_refused(name: str, direction: Direction) -> None:
    sources, targets, match = WRONG_PAGES[name]
    with scene() as s, refused(s, match):
        s.engine.submit(direction, sources, targets)


def test_a_page_may_be_read_twice() -> None:
    with scene(gated=False) as s:
        page, content = s.fill(H2D, 1)
        job = s.engine.submit(H2D, page * 2, [4, 9])
        assert s.engine.wait([job], 30)
        assert (s.arrived(job) == content).all()


@pytest.mark.parametrize(
    ("direction", "sources", "targets", "named"),
    [
        (D2H, [3], [7], "host page 7"),  # written by both
        (H2D, [7], [5], "host page 7"),  # reads what the first writes
        (H2D, [2], [1], "device page 1"),  # writes what the first reads
        (D2H, [3, 4, 5], [1, 2, 7], "host page 7"),  # the last one of several
    ],
)
def test_a_page_in_two_live_jobs_is_refused(
    direction: Direction, sources: list[int], targets: list[int], named: str
) -> None:
    with scene() as s:
        first = s.engine.submit(D2H, [0, 1], [6, 7])
        with refused(s, named):
            s.engine.submit(direction, sources, targets)
        s.let_all()
        assert first.state is JobState.DONE
        s.engine.submit(direction, sources, targets)
        s.let_all()


def test_two_live_jobs_may_read_a_page() -> None:
    with scene() as s:
        page, content = s.fill(D2H, 1)
        jobs = [s.engine.submit(D2H, page, [target]) for target in (2, 5)]
        s.let_all()
        assert all((s.arrived(job) == content).all() for job in jobs)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_cancelling_twice_is_no_error_and_cancels_once(chunks: int) -> None:
    with scene() as s:
        job, _ = s.copy(H2D, 2)
        for _ in range(chunks):
            s.gate.let(0)
        told = [s.engine.cancel(job), s.engine.cancel(job)]
        assert told == [chunks < 2] * 2
        s.let_all()
        assert s.engine.cancel(job) is False
        assert s.metric("jobs_total", H2D, "cancelled") == (chunks < 2)


def test_a_job_is_known_to_its_own_engine_alone() -> None:
    with scene() as s, scene() as other:
        job, _ = other.copy(H2D, 1)
        with refused(s, "not submitted here"):
            s.engine.cancel(job)
        with refused(s, "not submitted here"):
            s.engine.raise_priority(job, Priority.URGENT)
        with refused(s, "not submitted here"):
            s.engine.submit(H2D, [0], [0], after=[job])
        assert job.state is JobState.IN_FLIGHT
        other.let_all()


def test_after_close_nothing_is_accepted() -> None:
    with scene() as s:
        job, _ = s.copy(H2D, 1)
        s.let_all()
        s.engine.close()
        with refused(s, "closed"):
            s.engine.submit(H2D, [0], [0])
        assert s.engine.cancel(job) is False
        assert s.engine.wait([job], 0)
        assert s.engine.poll() == [job]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"layerwise": True}, "layerwise"),
        ({"deadline_s": float("nan")}, "deadline"),
        ({"priority": 7}, "priority"),
    ],
)
def test_a_job_that_cannot_be_ordered_is_refused(how: dict[str, Any], match: str) -> None:
    with scene() as s, refused(s, match):
        s.engine.submit(D2H, [0], [0], **how)


def test_a_direction_that_is_none_is_refused() -> None:
    with scene() as s, refused(s, "direction"):
        s.engine.submit("sideways", [0], [0])


def test_the_callers_arrays_are_his_own() -> None:
    """B03's kind: neither side sees what the other does to its arrays later."""
    with scene() as s:
        sources, targets = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
        job = s.engine.submit(D2H, sources, targets)
        sources[:], targets[:] = 9, 9
        assert job.source_pages.tolist() == [1, 2]
        assert job.target_pages.tolist() == [3, 4]
        with pytest.raises(ValueError, match="read-only"):
            job.target_pages[0] = 0
        assert job.source_pages.base is None
        s.let_all()


def test_layers_count_from_nought() -> None:
    with scene() as s:
        job, _ = s.copy(H2D, 1, layerwise=True)
        assert job.layers is not None
        for layer in (-1, 3):
            with pytest.raises(TransferError, match=f"layer {layer} of 3"):
                job.layers.layer_ready(layer)
        s.let_all()


def test_engines_that_could_never_move_a_page_are_refused() -> None:
    pools = Pools(2, 2)
    copy = CpuCopy(num_threads=1)
    windows = {way: FixedWindow() for way in Direction}
    backend = CpuBackend(pools.device_pool, pools.host_pool, copy)
    with pytest.raises(TransferError, match=f"less than a page of {PAGE_BYTES}"):
        TransferEngine(backend, chunk_bytes=PAGE_BYTES - 1, windows=windows)
    with pytest.raises(KvtierError, match=r"h2d"):
        TransferEngine(backend, chunk_bytes=PAGE_BYTES, windows={D2H: FixedWindow()})
    with pytest.raises(ConfigError, match="size_bytes=0"):
        FixedWindow(0)
    other = HostPool.allocate(2, PAGE_BYTES + 1)
    with other, pytest.raises(TransferError, match=f"{PAGE_BYTES + 1} bytes"):
        CpuBackend(pools.device_pool, other, copy)
    backend.close()
    pools.close()
