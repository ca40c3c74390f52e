"""Copies between pools in host memory, on one thread per direction."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor, torch
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.host_pool import HostPool
from kvtier.transfer.backend import Done
from kvtier.transfer.chunks import Geometry, page_runs
from kvtier.transfer.job import Chunk, Pages

_STAGING_BYTES = 1 << 20  # stays within the cache on its way through
_DIRECT_BYTES = 1 << 20  # a call costs as much as copying some 100 KB twice


class CpuBackend:
    """A `Backend` whose device is host memory, too; `copy` copies between its pages and rows.

    Runs of neighbouring host pages are gathered into, or scattered from, the host pool's rows
    where they are; scattered ones go through a block of `staging_bytes` per direction.
    `device_pool` tells its layers; for a PagedPool `layers` are the segment indices of each layer,
    one segment per layer if not given. Pools and `copy` stay the caller's, and open until this is
    closed. Raises TransferError where the pools' pages differ, or the device is no host memory.
    """

    path_name = "cpu"
    polled = False

    def __init__(
        self,
        device_pool: DevicePool | PagedPool,
        host_pool: HostPool,
        copy: CopyBackend,
        *,
        layers: Sequence[range] | None = None,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        paged, ranges = _parts(device_pool, layers)
        packed = host_pool.packed
        if paged.device.type != "cpu":
            raise TransferError(f"the device pool is on {paged.device}; this copies host memory")
        if packed.shape[1] != paged.page_bytes:
            raise TransferError(
                f"host pages have {packed.shape[1]} bytes, device pages {paged.page_bytes}; "
                "allocate the host pool with the device pool's page_bytes"
            )
        self.geometry = Geometry(
            paged.num_pages,
            packed.shape[0],
            tuple(sum(paged.row_bytes[segment] for segment in layer) for layer in ranges),
            tuple(len(layer) for layer in ranges),
        )
        movers = {way: _Mover(way, paged, packed, copy, staging_bytes) for way in Direction}
        self._queues: dict[Direction, SimpleQueue[tuple[Chunk, Done] | None]] = {
            way: SimpleQueue() for way in Direction
        }
        self._threads = [
            Thread(target=_work, args=(self._queues[way], mover), name=f"kvtier-{way}", daemon=True)
            for way, mover in movers.items()
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def start(self, chunk: Chunk, done: Done) -> None:
        if self._closed:
            raise TransferError("this CpuBackend is closed; make another one")
        self._queues[chunk.direction].put((chunk, done))

    def poll(self) -> None:
        """Nothing to do: the threads call back."""

    def close(self) -> None:
        """End the threads once they are done with what was started. Twice is fine."""
        if not self._closed:
            self._closed = True
            for queue in self._queues.values():
                queue.put(None)
        for thread in self._threads:
            thread.join()


class _Mover:
    """Moves the bytes of chunks of one direction, one at a time."""

    def __init__(
        self,
        direction: Direction,
        device: PagedPool,
        packed: Tensor,
        copy: CopyBackend,
        staging_bytes: int,
    ) -> None:
        self._down = direction is Direction.D2H
        self._device = device
        self._packed = packed
        self._rows = PagedPool.of([packed])
        self._parts = self._rows if device.num_segments == 1 else _like(device, packed)
        self._copy = copy
        block = max(1, staging_bytes // device.page_bytes)
        self._staging = torch.empty((block, device.page_bytes), dtype=torch.uint8)

    def move(self, chunk: Chunk) -> None:
        device = self._device.segments(chunk.first_segment, chunk.num_segments)
        down = self._down
        device_ids = chunk.source_pages if down else chunk.target_pages
        host_ids = chunk.target_pages if down else chunk.source_pages
        runs = page_runs(host_ids)
        if chunk.num_bytes >= _DIRECT_BYTES * runs.starts.size or runs.starts.size == 1:
            for start, count in zip(runs.starts.tolist(), runs.num_pages.tolist(), strict=True):
                row = int(host_ids[start])
                packed = self._packed[row : row + count]
                self._between(device, device_ids[start : start + count], packed)
        else:
            whole = chunk.num_segments == self._device.num_segments
            parts = self._parts.segments(chunk.first_segment, chunk.num_segments)
            self._staged(device, device_ids, self._rows if whole else parts, host_ids)

    def _between(self, device: PagedPool, ids: Pages, packed: Tensor) -> None:
        if self._down:
            self._copy.gather(device, ids, packed)
        else:
            self._copy.scatter(device, ids, packed)

    def _staged(
        self, device: PagedPool, device_ids: Pages, host: PagedPool, host_ids: Pages
    ) -> None:
        block = self._staging.shape[0]
        for first in range(0, host_ids.size, block):
            pages = slice(first, min(first + block, host_ids.size))
            staging = self._staging[: pages.stop - first]
            if self._down:
                self._copy.gather(device, device_ids[pages], staging)
                self._copy.scatter(host, host_ids[pages], staging)
            else:
                self._copy.gather(host, host_ids[pages], staging)
                self._copy.scatter(device, device_ids[pages], staging)


def _work(queue: SimpleQueue[tuple[Chunk, Done] | None], mover: _Mover) -> None:
    while (item := queue.get()) is not None:
        chunk, done = item
        if not chunk.begun:
            chunk.begun = True
            try:
                done(_outcome(chunk, mover))
            except BaseException as error:  # a future's callback asked to exit: the thread goes on
                threading.excepthook(
                    threading.ExceptHookArgs(
                        (type(error), error, error.__traceback__, threading.current_thread())
                    )
                )
        del item, chunk, done  # what has ended is not kept until the next one comes


def _outcome(chunk: Chunk, mover: _Mover) -> Exception | None:
    try:
        if chunk.job.ready is not None:
            chunk.job.ready.wait()
        mover.move(chunk)
    except Exception as error:
        return error
    except BaseException as error:  # SystemExit of a `ready.wait()`, say
        return TransferError(f"{type(error).__name__}: {error}")
    return None


def _parts(
    device_pool: DevicePool | PagedPool, layers: Sequence[range] | None
) -> tuple[PagedPool, Sequence[range]]:
    if isinstance(device_pool, DevicePool):
        if layers is not None:
            raise TransferError("a DevicePool knows its layers; leave `layers` out")
        return device_pool.pool, device_pool.layers
    ranges = (
        [range(i, i + 1) for i in range(device_pool.num_segments)] if layers is None else layers
    )
    if [segment for layer in ranges for segment in layer] != list(range(device_pool.num_segments)):
        raise TransferError(
            f"layers={list(ranges)} are not the {device_pool.num_segments} segments in order"
        )
    return device_pool, ranges


def _like(device: PagedPool, packed: Tensor) -> PagedPool:
    """The host rows as a pool of the device's segments."""
    places = zip(device.offset_bytes, device.row_bytes, strict=True)
    return PagedPool.of([packed[:, begin : begin + row] for begin, row in places])
