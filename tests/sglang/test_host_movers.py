"""Page ids and runs of the host pool, and its copies by DMA with the DMA done on the host."""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError, CopyError
from kvtier.integration.sglang import movers
from kvtier.integration.sglang.cuda_rows import cuda_copy_rows
from kvtier.integration.sglang.movers import (
    STAGING_BYTES,
    DevicePages,
    DmaMover,
    page_ids,
    page_runs,
)
from kvtier.kernels.cpu import CpuCopy

STREAM = 4711


@pytest.mark.parametrize(
    ("slots", "page_size", "pages"),
    [
        ([], 16, []),
        ([5, 3, 3], 1, [5, 3, 3]),
        ([8, 9, 10, 11, 0, 1, 2, 3], 4, [2, 0]),
    ],
)
def test_whole_pages_of_slots_give_their_pages(
    slots: list[int], page_size: int, pages: list[int]
) -> None:
    assert page_ids(torch.tensor(slots, dtype=torch.int64), page_size).tolist() == pages


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1, 2, 3, 5, 6, 7, 8], "slots 5 to 8 at 4 are no page of 4"),
        ([0, 2, 1, 3], "slots 0 to 3 at 0"),
        ([3, 2, 1, 0], "slots 3 to 0 at 0"),
        ([0, 1, 2], "3 slots are no whole number of pages of 4"),
    ],
)
def test_slots_that_are_no_whole_pages_are_refused(slots: list[int], message: str) -> None:
    with pytest.raises(CopyError, match=message):
        page_ids(torch.tensor(slots), 4)


def test_slots_on_a_device_are_refused() -> None:
    with pytest.raises(CopyError, match="on meta; pass one dimension on the host"):
        page_ids(torch.empty(4, dtype=torch.int64, device="meta"), 4)


@pytest.mark.parametrize(
    ("pages", "boundary", "runs"),
    [
        ([], 100, []),
        ([7], 100, [(0, 1)]),
        ([7, 8, 9], 100, [(0, 3)]),
        ([9, 8, 7], 100, [(0, 1), (1, 2), (2, 3)]),
        ([3, 4, 4, 5, 9], 100, [(0, 2), (2, 4), (4, 5)]),
        ([1, 2, 3, 4, 5, 6, 7], 3, [(0, 2), (2, 5), (5, 7)]),
        ([2, 3, 4], 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_runs_are_as_long_as_the_ids_ascend_and_end_at_the_boundary(
    pages: list[int], boundary: int, runs: list[tuple[int, int]]
) -> None:
    assert page_runs(np.array(pages, dtype=np.int32), boundary) == runs


def test_strided_layers_make_no_pages() -> None:
    with pytest.raises(CopyError, match="must be contiguous"):
        DevicePages.of([[torch.zeros(8, 6)[:, :4]]], 4)


class _Pools:
    """Three layers of K and V of unequal rows, with slots that fill no last page; a host pool."""

    def __init__(self, page_size: int, num_pages: int, width: int = 5) -> None:
        generator = torch.Generator().manual_seed(3)
        slots = num_pages * page_size + page_size // 2
        self.layers = [
            [
                torch.randint(0, 256, (slots, columns), dtype=torch.uint8, generator=generator)
                for columns in (width, 2 * width)
            ]
            for _ in range(3)
        ]
        self.page_size = page_size
        self.pages = DevicePages.of(self.layers, page_size)
        self.host = torch.full((num_pages, self.pages.pool.page_bytes), 0xEE, dtype=torch.uint8)

    def packed(self, page: int) -> Tensor:
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        return torch.cat([t[slots].reshape(-1) for layer in self.layers for t in layer])


def _on_the_host(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The one call of cuda-bindings that is made, done on the host: pitches must be right."""

    def memcpy_2d(
        target: int, to: int, source: int, at: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[int]:
        if (kind, stream) != (4, STREAM) or width > min(to, at):
            return (1,)
        for row in range(height):
            ctypes.memmove(target + row * to, source + row * at, width)
        return (0,)

    runtime = ModuleType("cuda.bindings.runtime")
    runtime.cudaMemcpy2DAsync = memcpy_2d  # type: ignore[attr-defined]
    runtime.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # type: ignore[attr-defined]
    runtime.cudaError_t = SimpleNamespace(cudaSuccess=0)  # type: ignore[attr-defined]
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return runtime


@pytest.mark.parametrize("by", ["torch", "driver"])
@pytest.mark.parametrize("boundary", [2, 1 << 20])
@pytest.mark.parametrize(("page_size", "width"), [(1, 5), (4, 3), (64, 60)])
def test_copies_by_dma_move_every_byte_and_no_other(
    by: str,
    boundary: int,
    page_size: int,
    width: int,
    driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several parts each way: the staging buffer is cut down to fewer pages than there are."""
    copy_rows = _on_the_host if by == "torch" else cuda_copy_rows(torch.device("cpu"))
    num_pages = 24
    pools = _Pools(page_size, num_pages, width)
    monkeypatch.setattr(movers, "STAGING_BYTES", 3 * pools.pages.pool.page_bytes)
    sources = np.random.default_rng(1).permutation(num_pages)[: num_pages - 2]
    kept = np.roll(np.arange(1, num_pages - 1), 3)
    expected = pools.host.clone()
    for source, page in zip(sources, kept, strict=True):
        expected[page] = pools.packed(int(source))
    with CpuCopy() as copy:
        mover = DmaMover(pools.pages, pools.host, copy, copy_rows, boundary)
        mover.backup(sources, kept)
        assert torch.equal(pools.host, expected)
        before = [[tensor.clone() for tensor in layer] for layer in pools.layers]
        for tensor in (tensor for layer in pools.layers for tensor in layer):
            tensor.fill_(0xDD)
        for layer in (1, 0, 2):
            mover.load_layer(layer, kept, sources)
            _check_layer(pools, before, layer, sources)
    assert torch.equal(pools.host, expected)


def _check_layer(
    pools: _Pools, before: list[list[Tensor]], layer: int, pages: np.ndarray[tuple[int], np.dtype]
) -> None:
    slots = (pages[:, None] * pools.page_size + np.arange(pools.page_size)).reshape(-1)
    for now, original in zip(pools.layers[layer], before[layer], strict=True):
        expected = torch.full_like(original, 0xDD)
        expected[slots] = original[slots]
        assert torch.equal(now, expected)


def test_a_load_writes_no_other_layer() -> None:
    pools = _Pools(page_size=4, num_pages=6)
    with CpuCopy() as copy:
        mover = DmaMover(pools.pages, pools.host, copy, _on_the_host, 100)
        others = [tensor.clone() for layer in (0, 2) for tensor in pools.layers[layer]]
        mover.load_layer(1, [0, 3], [5, 2])
    now = [tensor for layer in (0, 2) for tensor in pools.layers[layer]]
    assert all(torch.equal(a, b) for a, b in zip(now, others, strict=True))
    assert all(bool((tensor[8:12] == 0xEE).all()) for tensor in pools.layers[1])


def test_no_dma_crosses_pieces_of_host_memory_or_moves_more_than_the_staging_buffer_holds() -> None:
    pools = _Pools(page_size=64, num_pages=2000, width=60)
    copied: list[tuple[int, int]] = []

    def record(target: Tensor, source: Tensor) -> None:
        first = (target.data_ptr() - pools.host.data_ptr()) // pools.host.shape[1]
        copied.append((first, first + target.shape[0]))
        target.copy_(source)

    with CpuCopy() as copy:
        mover = DmaMover(pools.pages, pools.host, copy, record, boundary=700)
        mover.backup(np.arange(2000), np.arange(2000))
    assert [page for first, end in copied for page in range(first, end)] == list(range(2000))
    assert all(first // 700 == (end - 1) // 700 for first, end in copied)
    assert all((end - first) * pools.host.shape[1] <= STAGING_BYTES for first, end in copied)
    assert len(copied) == len({*range(0, 2000, STAGING_BYTES // pools.host.shape[1]), 700, 1400})


@pytest.mark.parametrize("up", [False, True], ids=["backup", "load"])
def test_a_page_written_twice_is_refused_before_the_first_part_is_copied(
    up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = _Pools(page_size=4, num_pages=8)
    monkeypatch.setattr(movers, "STAGING_BYTES", 2 * pools.pages.layers[0].page_bytes)
    host = pools.host.clone()
    layer = pools.layers[0][0].clone()
    with CpuCopy() as copy:
        mover = DmaMover(pools.pages, pools.host, copy, _on_the_host, 100)
        write = partial(mover.load_layer, 0) if up else mover.backup
        with pytest.raises(CopyError, match="page id 5 occurs twice"):
            write([0, 1, 2, 3, 4, 6], [5, 1, 2, 3, 4, 5])
    assert torch.equal(pools.host, host)
    assert torch.equal(pools.layers[0][0], layer)


def test_a_copy_that_the_driver_refuses_is_an_error(driver: ModuleType) -> None:
    driver.cudaMemcpy2DAsync = lambda *arguments: (700,)  # type: ignore[attr-defined]
    rows = torch.zeros(2, 8, dtype=torch.uint8)
    with pytest.raises(CopyError, match="2 rows of 8 bytes failed: 700"):
        cuda_copy_rows(torch.device("cpu"))(rows, rows.clone())


@pytest.mark.parametrize("name", ["cuda", "cuda.bindings"])
def test_missing_cuda_bindings_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install cuda-python"):
        cuda_copy_rows(torch.device("cpu"))
