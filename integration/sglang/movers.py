"""Ways of copying pages between SGLang's per-layer tensors and the page-first host pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.errors import CopyError
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.ids import Ids, PageIds, check_page_ids
from kvtier.kernels.pool import PagedPool

STAGING_BYTES = 32 << 20
"""Bound on the staging buffer of one direction; a single larger page still goes through one."""
_STRAIGHT_BYTES = 1 << 20  # runs of this length are worth their own call, without staging

CopyRows = Callable[[Tensor, Tensor], None]
"""Enqueues target[i] = source[i] for two uint8[n, bytes], the bytes of a row contiguous."""


def page_ids(slots: Tensor, page_size: int) -> npt.NDArray[np.int64]:
    """The pages, int64[n / page_size], that these token slots, int64[n] on the host, make up.

    Raises CopyError unless the slots are whole pages: each begins at a multiple of `page_size` and
    holds its slots in ascending order. Pages may come in any order.
    """
    if slots.device.type != "cpu" or slots.dim() != 1:
        raise CopyError(
            f"slots are {tuple(slots.shape)} on {slots.device}; pass one dimension on the host "
            'as the "direct" I/O backend does'
        )
    given = slots.numpy().astype(np.int64, copy=False)
    if given.size % page_size:
        raise CopyError(f"{given.size} slots are no whole number of pages of {page_size}")
    grid = given.reshape(-1, page_size)
    first = grid[:, 0]
    in_order = (grid == first[:, None] + np.arange(page_size)).all(axis=1)
    wrong = np.flatnonzero((first % page_size != 0) | ~in_order)
    if wrong.size:
        at = int(wrong[0])
        raise CopyError(
            f"slots {grid[at, 0]} to {grid[at, -1]} at {at * page_size} are no page of {page_size}"
        )
    return first // page_size


def page_runs(pages: Ids, boundary: int) -> list[tuple[int, int]]:
    """Ranges [first, end) of `pages` whose ids ascend by one, in order; as few as there can be.

    None goes on across a multiple of `boundary`, which counts pages.
    """
    if not len(pages):
        return []
    begins = (np.diff(pages) != 1) | (pages[1:] % boundary == 0)
    return list(pairwise([0, *(np.flatnonzero(begins) + 1).tolist(), len(pages)]))


@dataclass(frozen=True, eq=False)
class DevicePages:
    """The pages of a device pool: layer after layer, the segments of each (K and V, or MLA's one).

    `pool` has all segments; `layers[i]` those of layer i, with offsets within the layer's bytes,
    which begin at `offset_bytes(i)` of the whole page.
    """

    pool: PagedPool
    layers: tuple[PagedPool, ...]

    @classmethod
    def of(cls, layers: Sequence[Sequence[Tensor]], page_size: int) -> DevicePages:
        """Views of tensors [slots, ...] as uint8[slots // page_size, bytes], without a copy.

        Page p is slots [p * page_size, (p + 1) * page_size). Raises CopyError when the tensors
        make no pages (see PagedPool.of).
        """
        rows = [[_page_rows(tensor, page_size) for tensor in layer] for layer in layers]
        return cls(
            PagedPool.of([tensor for layer in rows for tensor in layer]),
            tuple(PagedPool.of(layer) for layer in rows),
        )

    def offset_bytes(self, layer: int) -> int:
        """Where the layer's bytes begin in a whole page."""
        return self.pool.offset_bytes[sum(pool.num_segments for pool in self.layers[:layer])]


def _page_rows(tensor: Tensor, page_size: int) -> Tensor:
    if not tensor.is_contiguous():
        raise CopyError(f"a layer's rows are strided {tensor.stride()}; they must be contiguous")
    num_pages = tensor.shape[0] // page_size
    pages = tensor[: num_pages * page_size].view(num_pages, -1)
    return pages.view(torch.uint8)


class PageMover(ABC):
    """Copies pages both ways, in parts of at most STAGING_BYTES; every id is checked before.

    `host` is uint8[pages, page_bytes]. Copies are done when a call returns, or, with CUDA, are
    enqueued on the current stream. Each direction has one staging buffer: call each from one
    thread and stream at a time. Raises CopyError, with nothing written, for page ids that are
    outside a pool, of unequal number, or twice among those written to.
    """

    def __init__(self, device: DevicePages, host: Tensor, copy: CopyBackend) -> None:
        self._device = device
        self._host = host
        self._copy = copy
        layer_bytes = [pool.page_bytes for pool in device.layers]
        on = device.pool.device
        self._down = torch.empty(_staging(device.pool.page_bytes), dtype=torch.uint8, device=on)
        self._up = torch.empty(_staging(max(layer_bytes)), dtype=torch.uint8, device=on)

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> None:
        """Host page host_pages[i] = device page device_pages[i], all layers."""
        device_ids = check_page_ids(device_pages, self._device.pool.num_pages, unique=False)
        host_ids = check_page_ids(host_pages, self._host.shape[0], unique=True)
        for part in _parts(device_ids, host_ids, self._device.pool.page_bytes):
            self._backup(device_ids[part], host_ids[part])

    def load_layer(self, layer: int, host_pages: PageIds, device_pages: PageIds) -> None:
        """Device page device_pages[i] = host page host_pages[i], the bytes of `layer` alone."""
        if not 0 <= layer < len(self._device.layers):
            raise CopyError(f"layer {layer} is none of the pool's {len(self._device.layers)}")
        host_ids = check_page_ids(host_pages, self._host.shape[0], unique=False)
        device_ids = check_page_ids(device_pages, self._device.pool.num_pages, unique=True)
        for part in _parts(device_ids, host_ids, self._device.layers[layer].page_bytes):
            self._load(layer, host_ids[part], device_ids[part])

    @abstractmethod
    def close(self) -> None:
        """End threads; a later copy raises CopyError. Call it after the last copy is done."""

    @abstractmethod
    def _backup(self, device_ids: Ids, host_ids: Ids) -> None: ...

    @abstractmethod
    def _load(self, layer: int, host_ids: Ids, device_ids: Ids) -> None: ...


class CpuMover(PageMover):
    """For a device pool in host memory. Long runs on the written side are copied straight there."""

    def __init__(self, device: DevicePages, host: Tensor) -> None:
        self._cpu = CpuCopy()
        super().__init__(device, host, self._cpu)
        self._host_pool = PagedPool.of([host])
        self._columns = [_columns(device, host, layer) for layer in range(len(device.layers))]
        self._segments = [_segment_columns(device, host, at) for at in range(len(device.layers))]

    def close(self) -> None:
        self._cpu.close()

    def _backup(self, device_ids: Ids, host_ids: Ids) -> None:
        pool = self._device.pool
        runs = _straight_runs(host_ids, pool.page_bytes)
        if runs is None:
            packed = _rows(self._down, len(device_ids), pool.page_bytes)
            self._copy.gather(pool, device_ids, packed)
            self._copy.scatter(self._host_pool, host_ids, packed)
            return
        for first, end in runs:
            to = int(host_ids[first])
            self._copy.gather(pool, device_ids[first:end], self._host[to : to + end - first])

    def _load(self, layer: int, host_ids: Ids, device_ids: Ids) -> None:
        pool = self._device.layers[layer]
        runs = _straight_runs(device_ids, pool.page_bytes)
        if runs is None:
            packed = _rows(self._up, len(host_ids), pool.page_bytes)
            self._copy.gather(self._columns[layer], host_ids, packed)
            self._copy.scatter(pool, device_ids, packed)
            return
        for segment, column in zip(pool.tensors, self._segments[layer], strict=True):
            for first, end in runs:
                to = int(device_ids[first])
                self._copy.gather(column, host_ids[first:end], segment[to : to + end - first])


class DmaMover(PageMover):
    """For a device pool that the host reaches by DMA, staged in device memory.

    `boundary` is the number of pages that the host pool registered with the driver at a time: one
    DMA must not cross it.
    """

    def __init__(
        self,
        device: DevicePages,
        host: Tensor,
        copy: CopyBackend,
        copy_rows: CopyRows,
        boundary: int,
    ) -> None:
        super().__init__(device, host, copy)
        self._copy_rows = copy_rows
        self._boundary = boundary

    def close(self) -> None:
        pass

    def _backup(self, device_ids: Ids, host_ids: Ids) -> None:
        pool = self._device.pool
        packed = _rows(self._down, len(device_ids), pool.page_bytes)
        self._copy.gather(pool, device_ids, packed)
        for first, end in page_runs(host_ids, self._boundary):
            to = int(host_ids[first])
            self._copy_rows(self._host[to : to + end - first], packed[first:end])

    def _load(self, layer: int, host_ids: Ids, device_ids: Ids) -> None:
        pool = self._device.layers[layer]
        packed = _rows(self._up, len(host_ids), pool.page_bytes)
        begin = self._device.offset_bytes(layer)
        column = self._host[:, begin : begin + pool.page_bytes]
        for first, end in page_runs(host_ids, self._boundary):
            at = int(host_ids[first])
            self._copy_rows(packed[first:end], column[at : at + end - first])
        self._copy.scatter(pool, device_ids, packed)


def _staging(row_bytes: int) -> int:
    return max(STAGING_BYTES, row_bytes)


def _parts(device_ids: Ids, host_ids: Ids, row_bytes: int) -> Iterator[slice]:
    if len(device_ids) != len(host_ids):
        raise CopyError(f"{len(device_ids)} device pages and {len(host_ids)} host pages")
    most = max(1, STAGING_BYTES // row_bytes)
    return (slice(first, first + most) for first in range(0, len(device_ids), most))


def _rows(staging: Tensor, num_rows: int, row_bytes: int) -> Tensor:
    return staging[: num_rows * row_bytes].view(num_rows, row_bytes)


def _straight_runs(written: Ids, row_bytes: int) -> list[tuple[int, int]] | None:
    """The runs to copy without staging; None where they are too short to be worth their calls."""
    runs = page_runs(written, boundary=np.iinfo(np.int32).max)
    few = len(runs) == 1 or len(runs) * _STRAIGHT_BYTES <= len(written) * row_bytes
    return runs if few else None


def _columns(device: DevicePages, host: Tensor, layer: int) -> PagedPool:
    """The layer's bytes of every host page, as one segment."""
    begin = device.offset_bytes(layer)
    return PagedPool.of([host[:, begin : begin + device.layers[layer].page_bytes]])


def _segment_columns(device: DevicePages, host: Tensor, layer: int) -> list[PagedPool]:
    """The bytes of each segment of the layer, of every host page."""
    begin = device.offset_bytes(layer)
    pool = device.layers[layer]
    return [
        PagedPool.of([host[:, begin + offset : begin + offset + row]])
        for offset, row in zip(pool.offset_bytes, pool.row_bytes, strict=True)
    ]
