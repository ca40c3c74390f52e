"""The CPU backend: bytes where they belong and nowhere else, in order, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch
from torch import Tensor

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.ids import PageIds
from kvtier.kernels.pool import PagedPool
from kvtier.layout import KVLayout
from kvtier.layout.kv import KVDtype, Segment
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.host_pool import HostPool
from kvtier.transfer.chunks import Cutter, Piece
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.job import Chunk, Job, Ready

from .cores import D2H, H2D

Bytes = npt.NDArray[np.uint8]

ROWS = (48, 7, 33, 16)
LAYERS = (range(2), range(2, 3), range(3, 4))
PAGE_BYTES = sum(ROWS)
DEVICE_PAGES, HOST_PAGES = 40, 50


class Pools:
    """Device segments and host pages full of random bytes, and a backend between them."""

    def __init__(self, rows: Sequence[int] = ROWS, *, staging_pages: int = 3) -> None:
        self.random = np.random.default_rng(7)
        self.segments = [
            torch.from_numpy(self.random.integers(0, 256, (DEVICE_PAGES, row), np.uint8))
            for row in rows
        ]
        page_bytes = sum(rows)
        self.host_pool = HostPool.allocate(HOST_PAGES, page_bytes)
        self.host: Bytes = self.host_pool.packed.numpy()
        self.host[:] = self.random.integers(0, 256, self.host.shape, np.uint8)
        self.copy = RecordingCopy(1)
        self.backend = CpuBackend(
            PagedPool.of(self.segments),
            self.host_pool,
            self.copy,
            layers=LAYERS if len(rows) == len(ROWS) else None,
            staging_bytes=staging_pages * page_bytes,
        )

    def device(self) -> Bytes:
        """uint8[pages, page_bytes], a copy."""
        return np.concatenate([segment.numpy() for segment in self.segments], axis=1)

    def chunk(
        self,
        direction: Direction,
        source: Sequence[int],
        target: Sequence[int],
        layers: range = range(3),
        ready: Ready | None = None,
    ) -> Chunk:
        job = Job(direction, source, target, layerwise=len(layers) < 3, ready=ready)
        geometry = self.backend.geometry
        piece: Piece = (0, len(source), layers.start, min(layers.stop, geometry.num_layers))
        cutter = Cutter(geometry, geometry.page_bytes)
        return cutter.chunk(job, piece, cutter.num_bytes(piece), 0.0)

    def run(self, *chunks: Chunk) -> list[Exception | None]:
        """Start the chunks; what `done` was called with, in the order of the ends."""
        ends: list[Exception | None] = []
        over = threading.Semaphore(0)

        def done(error: Exception | None) -> None:
            ends.append(error)
            over.release()

        for chunk in chunks:
            self.backend.start(chunk, done)
        for _ in chunks:
            assert over.acquire(timeout=30)
        return ends

    def close(self) -> None:
        self.backend.close()
        self.copy.close()
        self.host_pool.close()


class RecordingCopy(CpuCopy):
    """Remembers the address of each `packed`, and fails on request."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.packed_at: list[int] = []
        self.error: Exception | None = None

    def gather(
        self, pool: PagedPool, page_ids: PageIds, packed: Tensor, *, checksums: Tensor | None = None
    ) -> None:
        if self.error is not None:
            raise self.error
        self.packed_at.append(packed.data_ptr())
        super().gather(pool, page_ids, packed, checksums=checksums)


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def pairs(most: int) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """Device ids and as many host ids: scattered, in runs, or one run."""
    return st.integers(1, most).flatmap(
        lambda count: st.tuples(ids(count, DEVICE_PAGES), ids(count, HOST_PAGES))
    )


def ids(count: int, num_pages: int) -> st.SearchStrategy[list[int]]:
    scattered = st.permutations(range(num_pages)).map(lambda order: order[:count])
    run = st.integers(0, num_pages - count).map(lambda first: [*range(first, first + count)])
    return scattered | run | scattered.map(sorted)


@settings(max_examples=60)
@given(pairs(30), st.sampled_from([1, 3, 100]), st.sampled_from(Direction), st.data())
def test_bytes_arrive_and_all_others_stay(
    given_ids: tuple[list[int], list[int]],
    staging_pages: int,
    direction: Direction,
    data: st.DataObject,
) -> None:
    device_ids, host_ids = given_ids
    first = data.draw(st.integers(0, 2)) if direction is H2D else 0
    layers = range(first, data.draw(st.integers(first + 1, 3)) if direction is H2D else 3)
    pools = Pools(staging_pages=staging_pages)
    device, host = pools.device(), pools.host.copy()
    begin = (0, 55, 88, 104)[layers.start]
    columns = slice(begin, (0, 55, 88, 104)[layers.stop])
    if direction is D2H:
        host[host_ids] = device[device_ids]
        chunk = pools.chunk(D2H, device_ids, host_ids)
    else:
        device[device_ids, columns] = host[host_ids, columns]
        chunk = pools.chunk(H2D, host_ids, device_ids, layers)
    assert pools.run(chunk) == [None]
    assert np.array_equal(pools.device(), device)
    assert np.array_equal(pools.host, host)
    pools.close()


def test_a_page_may_be_read_twice(pools: Pools) -> None:
    assert pools.run(pools.chunk(H2D, [4, 4, 4], [9, 1, 5])) == [None]
    assert (pools.device()[[9, 1, 5]] == pools.host[4]).all()


def test_one_run_of_host_pages_is_gathered_where_it_belongs(pools: Pools) -> None:
    pools.run(pools.chunk(D2H, [3, 30, 4, 9], [20, 21, 22, 23]))
    assert pools.copy.packed_at == [pools.host[20:].ctypes.data]


def test_long_runs_of_host_pages_are_gathered_each_where_it_belongs() -> None:
    pools = Pools([300_000])
    pools.run(pools.chunk(D2H, range(12), [*range(8), *range(20, 24)]))
    assert pools.copy.packed_at == [pools.host[first:].ctypes.data for first in (0, 20)]
    pools.close()


def test_scattered_host_pages_go_through_the_staging_block(pools: Pools) -> None:
    pools.run(pools.chunk(D2H, range(7), range(0, 14, 2)))
    assert len(pools.copy.packed_at) == 3
    assert len(set(pools.copy.packed_at)) == 1


def test_chunks_of_a_direction_are_copied_in_the_order_of_their_starts(pools: Pools) -> None:
    expected = pools.device()[7]
    chunks = [pools.chunk(D2H, [page], [5]) for page in range(8)]
    assert pools.run(*chunks) == [None] * 8
    assert np.array_equal(pools.host[5], expected)


def test_b27_a_copy_waits_for_the_write_that_it_reads(pools: Pools) -> None:
    written = threading.Event()
    chunk = pools.chunk(D2H, [3], [8], ready=written)
    other = pools.chunk(H2D, [1], [2])  # the other direction does not wait

    def write() -> None:
        assert pools.run(other) == [None]
        assert not chunk.job.state.ended
        for segment in pools.segments:
            segment[3] = 42
        written.set()

    compute = threading.Thread(target=write)
    compute.start()
    assert pools.run(chunk) == [None]
    compute.join()
    assert (pools.host[8] == 42).all()


class NeverReady:
    def wait(self) -> object:
        raise RuntimeError("the stream is lost")


def test_what_never_becomes_ready_fails_the_chunk_and_copies_nothing(pools: Pools) -> None:
    before = pools.host.copy()
    (error,) = pools.run(pools.chunk(D2H, [3], [8], ready=NeverReady()))
    assert str(error) == "the stream is lost"
    assert np.array_equal(pools.host, before)


def test_a_failed_copy_is_reported_and_the_next_one_goes_on(pools: Pools) -> None:
    pools.copy.error = OSError("bad memory")
    assert pools.run(pools.chunk(D2H, [3], [8])) == [pools.copy.error]
    pools.copy.error = None
    assert pools.run(pools.chunk(D2H, [3], [8])) == [None]


def test_a_chunk_that_is_started_twice_is_copied_once(pools: Pools) -> None:
    chunk, last = pools.chunk(D2H, [3], [8]), pools.chunk(D2H, [4], [9])
    calls: list[str] = []
    over = threading.Event()
    pools.backend.start(chunk, lambda error: calls.append("first"))
    pools.backend.start(chunk, lambda error: calls.append("second"))
    pools.backend.start(last, lambda error: over.set())
    assert over.wait(30)
    assert calls == ["first"]


def test_closing_ends_what_was_started_and_refuses_more(pools: Pools) -> None:
    gate = threading.Event()
    calls: list[Exception | None] = []
    pools.backend.start(pools.chunk(D2H, [3], [8], ready=gate), calls.append)
    pools.backend.start(pools.chunk(D2H, [4], [9]), calls.append)
    gate.set()
    pools.backend.close()
    pools.backend.close()
    assert calls == [None, None]
    with pytest.raises(TransferError, match="is closed"):
        pools.backend.start(pools.chunk(D2H, [4], [9]), calls.append)


def test_a_device_pool_tells_its_layers() -> None:
    segments = tuple(Segment(f"{name}.{at}", at, 8 + at) for at in range(3) for name in "kv")
    pool = DevicePool.allocate(KVLayout(segments, KVDtype.FP8, page_size=2), num_pages=5)
    with HostPool.allocate(6, pool.page_bytes) as host, CpuCopy(1) as copy:
        backend = CpuBackend(pool, host, copy)
        geometry = backend.geometry
        assert (geometry.device_pages, geometry.host_pages) == (5, 6)
        assert (geometry.layer_bytes, geometry.layer_segments) == ((32, 36, 40), (2, 2, 2))
        backend.close()
        with pytest.raises(TransferError, match="knows its layers"):
            CpuBackend(pool, host, copy, layers=[range(6)])


def test_pools_that_do_not_fit_one_another() -> None:
    paged = PagedPool.of([torch.zeros((4, 8), dtype=torch.uint8)] * 1)
    with HostPool.allocate(2, 9) as host, CpuCopy(1) as copy:
        with pytest.raises(TransferError, match="host pages have 9 bytes, device pages 8"):
            CpuBackend(paged, host, copy)
        elsewhere = PagedPool.of([torch.zeros((4, 9), dtype=torch.uint8, device="meta")])
        with pytest.raises(TransferError, match="the device pool is on meta"):
            CpuBackend(elsewhere, host, copy)


@pytest.mark.parametrize(
    "layers", [[range(2), range(3, 4)], [range(5)], [], [range(1, 4), range(1)]]
)
def test_layers_are_all_segments_in_order(layers: list[range]) -> None:
    paged = PagedPool.of([torch.zeros((4, 2), dtype=torch.uint8) for _ in range(4)])
    refused = pytest.raises(TransferError, match="are not the 4 segments in order")
    with HostPool.allocate(2, 8) as host, CpuCopy(1) as copy, refused:
        CpuBackend(paged, host, copy, layers=layers)
