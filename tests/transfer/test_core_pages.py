"""Which pages may be in which jobs at once; misuse is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.errors import ConfigError, TransferError
from kvtier.ids import Direction
from kvtier.transfer.chunks import Geometry
from kvtier.transfer.core import TransferCore
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Job, PageIds, Priority

from .cores import D2H, H2D, PAGE_BYTES, Scene


def test_two_live_jobs_may_read_one_page() -> None:
    scene = Scene()
    for target in range(3):
        scene.core.submit(Job(H2D, [7, 7], [2 * target, 2 * target + 1]), 0.0)
    scene.core.check_integrity()
    scene.run()
    scene.core.submit(Job(D2H, [9], [7]), 0.0)


@pytest.mark.parametrize(
    ("direction", "source", "target", "message"),
    [
        (H2D, 5, 1, "host page 5 is written by another live job"),
        (D2H, 9, 5, "host page 5 is in another live job"),
        (D2H, 9, 6, "host page 6 is in another live job"),
        (H2D, 9, 1, "device page 1 is in another live job"),
        (H2D, 9, 2, "device page 2 is in another live job"),
        (D2H, 2, 9, "device page 2 is written by another live job"),
    ],
)
def test_a_page_that_is_written_is_in_no_other_live_job(
    direction: Direction, source: int, target: int, message: str
) -> None:
    scene = Scene()
    scene.core.submit(Job(D2H, [1], [5]), 0.0)
    scene.core.submit(Job(H2D, [6], [2]), 0.0)
    scene.refuses(message, Job(direction, [8, source], [8, target]))
    scene.run()
    scene.core.submit(Job(direction, [8, source], [8, target]), 0.0)


def test_a_job_may_use_the_pages_of_those_that_it_comes_after() -> None:
    scene = Scene()
    down = scene.job(D2H, [1])
    up = scene.job(H2D, [1], after=[down])
    scene.refuses("device page 1", Job(D2H, [1], [9], after=[down]))
    again = Job(D2H, [1], [9], after=[up])
    scene.core.submit(again, 0.0)
    assert [chunk.job for chunk in scene.run()] == [down, up, again]


def test_all_users_of_a_page_must_come_before() -> None:
    scene = Scene()
    readers = [Job(D2H, [1], [target]) for target in (5, 6)]
    for job in readers:
        scene.core.submit(job, 0.0)
    scene.refuses("device page 1 is in another", Job(H2D, [9], [1], after=readers[:1]))
    scene.core.submit(Job(H2D, [9], [1], after=readers), 0.0)
    scene.core.check_integrity()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([], [], "there are no source pages"),
        ([1], [1, 2], "1 source pages and 2 target pages"),
        ([1, 2], [3, 3], "target page 3 occurs twice"),
        ([*range(300)], [5, *range(299)], "target page 5 occurs twice"),
        ([*range(300)], [5, 1 << 30, *range(298)], "target page 5 occurs twice"),
        ([-1], [0], "source page -1 is outside every pool"),
        ([0], [1 << 31], "target page 2147483648 is outside every pool"),
        ([0.5], [0], "dtype float64"),
        ([True], [0], "dtype bool"),
        ([[1]], [0], r"shape \(1, 1\)"),
        ([[1], [2, 3]], [0], "no array of one dimension"),
        (5, [0], r"shape \(\)"),
        (["a"], [0], "pass integers"),
    ],
)
def test_ids_that_make_no_job(source: PageIds, target: PageIds, message: str) -> None:
    with pytest.raises(TransferError, match=message) as caught:
        Job(H2D, source, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("page", [8, np.int32(8), np.iinfo(np.int32).max, -1])
def test_pages_outside_a_pool_are_refused(page: int) -> None:
    scene = Scene(num_pages=8)
    ids = np.array([page], np.int32)
    other = np.zeros(1, np.int32)
    scene.refuses(f"device page {page} is outside the pool of 8 pages", Job(D2H, ids, other))
    scene.refuses(f"device page {page} is outside the pool of 8 pages", Job(H2D, other, ids))
    scene.refuses(f"host page {page} is outside the pool of 8 pages", Job(H2D, ids, other))


def test_a_job_owns_its_ids() -> None:
    given = np.array([1, 2, 3], np.int32)
    wide = np.arange(100, dtype=np.int32)
    job = Job(H2D, given, wide[:3])
    given[:] = 9
    assert job.source_pages.tolist() == [1, 2, 3]
    assert (job.source_pages.base, job.target_pages.base) == (None, None)
    with pytest.raises(ValueError, match="read-only"):
        job.source_pages[0] = 5


def test_a_job_belongs_to_one_core() -> None:
    scene, other = Scene(), Scene()
    job = scene.job()
    with pytest.raises(TransferError, match="was submitted before"):
        scene.core.submit(job, 0.0)
    other.refuses("in `after` was not submitted here", Job(H2D, [1], [1], after=[job]))
    scene.refuses(
        "in `after` was not submitted here", Job(H2D, [1], [1], after=[Job(H2D, [2], [2])])
    )
    for refused in (other.core.cancel, other.core.submit):
        with pytest.raises(TransferError, match="submitted"):
            refused(job, 0.0)
    with pytest.raises(TransferError, match="was not submitted here"):
        other.core.raise_priority(job, Priority.URGENT)


def test_layerwise_goes_up_only() -> None:
    with pytest.raises(TransferError, match="layerwise copies go from host to device"):
        Job(D2H, [1], [1], layerwise=True)


@pytest.mark.parametrize(
    ("layers", "segments", "message"),
    [((), (), "at least one layer"), ((4, 0), (), "bytes"), ((4,), (1, 1), "layer_segments")],
)
def test_geometries_that_make_no_page(
    layers: Sequence[int], segments: Sequence[int], message: str
) -> None:
    with pytest.raises(TransferError, match=message):
        Geometry(1, 1, tuple(layers), tuple(segments))


def test_sizes_that_make_no_core() -> None:
    windows = {direction: FixedWindow() for direction in Direction}
    with pytest.raises(TransferError, match="chunk_bytes=99 is less than a page of 100 bytes"):
        TransferCore(Geometry(1, 1, (PAGE_BYTES,)), chunk_bytes=99, windows=windows)
    with pytest.raises(ConfigError, match="size_bytes=0"):
        FixedWindow(0)
