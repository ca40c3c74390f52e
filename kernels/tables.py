"""Tables on the device that tell a kernel where the segments of a pool lie."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvtier.kernels.ids import Ids
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor, torch


class SegmentTables:
    """One table per pool and word width, kept as long as its pool lives."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[PagedPool, dict[int, Tensor]] = WeakKeyDictionary()

    def table(self, pool: PagedPool, word_bytes: int) -> Tensor:
        """int64[segments, 4] on the pool's device, safe to read on the current stream."""
        tables = self._tables.setdefault(pool, {})
        if word_bytes not in tables:
            # Waits for the upload: the next copy may be on another stream.
            rows = torch.tensor(segment_rows(pool, word_bytes), dtype=torch.int64)
            tables[word_bytes] = rows.to(pool.device)
        table = tables[word_bytes]
        if table.is_cuda:
            # The pool may be dropped while this stream still reads the table.
            table.record_stream(torch.cuda.current_stream(pool.device))
        return table


def segment_rows(pool: PagedPool, word_bytes: int) -> list[tuple[int, int, int, int]]:
    """Base address, and stride, offset and row in words of `word_bytes`, of each segment."""
    sizes = zip(pool.bases, pool.stride_bytes, pool.offset_bytes, pool.row_bytes, strict=True)
    return [
        (base, stride // word_bytes, offset // word_bytes, row // word_bytes)
        for base, stride, offset, row in sizes
    ]


def upload(ids: Ids, device: torch.device) -> Tensor:
    """int32[n] on the device; the current stream waits for it, the host does not."""
    host = torch.from_numpy(ids)
    if device.type != "cuda":
        return host
    # From pinned memory, which torch keeps until the copy is done: a pageable upload would make
    # the host wait for the whole stream.
    return host.pin_memory().to(device, non_blocking=True)
