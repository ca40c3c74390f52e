"""Jobs in chunks, chunks in runs, layers as they come."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TransferError
from kvtier.transfer.chunks import Cutter, Geometry, descriptors, page_runs
from kvtier.transfer.job import Job, JobState

from .cores import H2D, Scene

LAYERS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(LAYERS, st.integers(1, 60), st.integers(0, 400), st.booleans())
def test_chunks_cover_each_byte_once_in_order_and_none_is_too_large(
    layer_bytes: list[int], num_pages: int, more_bytes: int, layerwise: bool
) -> None:
    geometry = Geometry(num_pages, num_pages, tuple(layer_bytes))
    chunk_bytes = geometry.page_bytes + more_bytes
    cutter = Cutter(geometry, chunk_bytes)
    job = Job(H2D, range(num_pages), range(num_pages), layerwise=layerwise)
    seen = np.zeros((num_pages, len(layer_bytes)), np.int32)
    at: list[tuple[int, int]] = []
    for piece in cutter.pieces(job):
        first_page, end_page, first, end = piece
        assert first_page < end_page
        assert first < end
        seen[first_page:end_page, first:end] += 1
        chunk = cutter.chunk(job, piece, cutter.num_bytes(piece), 0.0)
        assert chunk.num_bytes == (end_page - first_page) * sum(layer_bytes[first:end])
        assert chunk.num_bytes <= chunk_bytes
        assert chunk.source_pages.base is job.source_pages
        assert chunk.source_pages.tolist() == [*range(first_page, end_page)]
        at.append((first, first_page))
    assert (seen == 1).all()
    assert at == sorted(at)


def test_chunks_are_as_large_as_they_may_be() -> None:
    scene = Scene(chunk_pages=4)
    scene.job(pages=10)
    assert [chunk.source_pages.size for chunk in scene.issue()] == [4, 4, 2]


def test_layers_go_in_order_and_share_a_chunk_where_they_fit_whole() -> None:
    scene = Scene(chunk_pages=2)
    scene.job(pages=2, layerwise=True)
    scene.job(pages=3, layerwise=True)
    scene.job(pages=7, layerwise=True)
    found = [
        (c.source_pages.size, c.first_layer, c.end_layer, c.first_segment, c.num_segments)
        for c in scene.run()
    ]
    assert found == [
        (2, 0, 3, 0, 6),
        (3, 0, 1, 0, 2),
        (3, 1, 2, 2, 1),
        (3, 2, 3, 3, 3),
        *[(n, 0, 1, 0, 2) for n in (6, 1)],
        *[(n, 1, 2, 2, 1) for n in (4, 3)],
        (7, 2, 3, 3, 3),
    ]


def test_a_layer_is_ready_when_all_pages_have_it() -> None:
    scene = Scene(chunk_pages=1)
    job = scene.job(pages=3, layerwise=True)
    assert job.layers is not None
    chunks = scene.issue()
    by_layer = [[c for c in chunks if c.first_layer == layer] for layer in range(3)]
    assert [len(layer) for layer in by_layer] == [1, 2, 1]
    scene.end(by_layer[0][0])
    assert [job.layers.layer_ready(layer) for layer in range(3)] == [True, False, False]
    scene.end(by_layer[2][0])
    scene.end(by_layer[1][1])
    assert job.pages_done == 1
    assert not job.layers.wait_layer(1, timeout_s=0.0)
    scene.end(by_layer[1][0])
    assert job.layers.wait_layer(1)
    assert (job.state, job.pages_done) == (JobState.DONE, 3)


def test_a_thread_waits_for_its_layer() -> None:
    scene = Scene(chunk_pages=1)
    job = scene.job(pages=2, layerwise=True)
    progress = job.layers
    assert progress is not None
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(progress.wait_layer(2, 30.0)))
    thread.start()
    scene.run()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_law_4_no_layer_of_a_job_that_was_not_done_is_ready(how: str) -> None:
    scene = Scene(chunk_pages=1)
    job = scene.job(pages=2, layerwise=True)
    progress = job.layers
    assert progress is not None
    first, second, third = scene.issue()
    scene.end(first)
    assert progress.layer_ready(0)
    if how == "is cancelled":
        scene.cancel(job)
    scene.end(second, OSError("gone") if how == "fails" else None)
    scene.end(third)
    assert job.state.ended
    reason = "a chunk failed: gone" if how == "fails" else "cancelled"
    for layer in range(3):
        assert not progress.layer_ready(layer)
        with pytest.raises(TransferError, match=f"layer {layer} is not there: .*{reason}"):
            progress.wait_layer(layer)


@pytest.mark.parametrize("layer", [-1, 3])
def test_there_are_no_other_layers(layer: int) -> None:
    progress = Scene().job(layerwise=True).layers
    assert progress is not None
    with pytest.raises(TransferError, match=f"layer {layer} of 3"):
        progress.layer_ready(layer)
    with pytest.raises(TransferError, match=f"layer {layer} of 3"):
        progress.wait_layer(layer)


def test_only_layerwise_jobs_tell_of_layers() -> None:
    assert Scene().job().layers is None


IDS = st.lists(st.integers(0, 12), min_size=1, max_size=30).map(lambda ids: np.array(ids, np.int32))


@given(st.data(), IDS)
def test_runs_are_the_longest_in_which_all_ids_grow_by_one(
    data: st.DataObject, source: np.ndarray
) -> None:
    target = np.array(
        data.draw(st.lists(st.integers(0, 12), min_size=source.size, max_size=source.size)),
        np.int32,
    )
    for page_ids in ((source,), (source, target)):
        runs = page_runs(*page_ids)
        expected = [
            at
            for at in range(source.size)
            if at == 0 or any(ids[at] != ids[at - 1] + 1 for ids in page_ids)
        ]
        assert runs.starts.tolist() == expected
        assert runs.num_pages.tolist() == np.diff([*expected, source.size]).tolist()


def test_descriptors_name_each_byte_with_64_bits() -> None:
    page_bytes = 3 << 20
    source, target = np.array([2**31 - 2, 2**31 - 1, 7], np.int32), np.array([0, 1, 2], np.int32)
    found = descriptors(source, 1 << 50, target, 1 << 40, page_bytes)
    assert found.source.tolist() == [(1 << 50) + page * page_bytes for page in (2**31 - 2, 7)]
    assert found.target.tolist() == [(1 << 40) + page * page_bytes for page in (0, 2)]
    assert found.num_bytes.tolist() == [2 * page_bytes, page_bytes]
