"""`CupyCopy`: the copies of `TritonCopy` in CUDA C, written independently of it.

It is there to be compared with: in tests byte for byte, in benchmarks for speed.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtier.errors import CopyError
from kvtier.kernels.cuda_source import KERNEL_NAME, SOURCE, Variant, make_geometry
from kvtier.kernels.cupy_device import check_cuda, load_cupy, on_current_stream
from kvtier.kernels.ids import Ids, PageIds, check_page_ids
from kvtier.kernels.pool import PagedPool, check_checksums, check_packed


class CupyCopy:
    """Copies by a CuPy RawKernel on CUDA tensors, on torch's current stream (see CopyBackend).

    Each variant is compiled at its first use on a device; CuPy keeps it on disk. `max_blocks`
    bounds the blocks of a launch; by default there is one for each piece of work. Raises CopyError
    at once without CuPy, NVRTC or a CUDA device.
    """

    name = "cupy"

    def __init__(self, max_blocks: int | None = None) -> None:
        if max_blocks is not None and max_blocks < 1:
            raise CopyError(f"max_blocks={max_blocks} must be at least 1, or None for no bound")
        self.max_blocks = max_blocks
        self._cupy = load_cupy()
        self._kernels: dict[Variant, Any] = {}
        self._tables: WeakKeyDictionary[PagedPool, dict[int, Tensor]] = WeakKeyDictionary()

    def gather(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """packed[i] = page page_ids[i]; ids may repeat."""
        ids = check_page_ids(page_ids, pool.num_pages, unique=False)
        self._copy(pool, ids, packed, checksums, scatter=False)

    def scatter(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """Page page_ids[i] = packed[i]; no id may repeat."""
        ids = check_page_ids(page_ids, pool.num_pages, unique=True)
        self._copy(pool, ids, packed, checksums, scatter=True)

    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        check_cuda(pool.device)
        check_packed(packed, len(ids), pool)
        check_checksums(checksums, len(ids), pool)
        if not len(ids):
            return
        word_bytes = pool.word_bytes(packed.data_ptr())
        table = self._table(pool, word_bytes)
        # From pinned memory: a pageable upload would make the host wait for the whole stream.
        on_device = torch.from_numpy(ids).pin_memory().to(pool.device, non_blocking=True)
        if checksums is not None:
            checksums.zero_()
        geometry = make_geometry(
            len(ids), pool.num_segments, max(pool.row_bytes) // word_bytes, self.max_blocks
        )
        arguments = (
            table.data_ptr(),
            on_device.data_ptr(),
            packed.data_ptr(),
            0 if checksums is None else checksums.data_ptr(),
            len(ids),
            pool.num_segments,
            pool.page_bytes // word_bytes,
        )
        kernel = self._kernel(Variant(word_bytes, scatter, checksums is not None))
        with on_current_stream(self._cupy, pool.device):
            kernel(geometry.grid, geometry.block, arguments)

    def _kernel(self, variant: Variant) -> Any:
        if variant not in self._kernels:
            self._kernels[variant] = self._cupy.RawKernel(
                SOURCE, KERNEL_NAME, options=variant.options
            )
        return self._kernels[variant]

    def _table(self, pool: PagedPool, word_bytes: int) -> Tensor:
        """int64[segments, 4] on the pool's device, as `Segment` in the source lays it out."""
        tables = self._tables.setdefault(pool, {})
        if word_bytes not in tables:
            # Waits for the upload: the next copy may be on another stream.
            tables[word_bytes] = torch.tensor(segment_rows(pool, word_bytes)).to(pool.device)
        table = tables[word_bytes]
        # The pool may be dropped while this stream still reads the table.
        table.record_stream(torch.cuda.current_stream(pool.device))
        return table


def segment_rows(pool: PagedPool, word_bytes: int) -> list[tuple[int, int, int, int]]:
    """Base address, and stride, offset and row in words of `word_bytes`, of each segment."""
    sizes = zip(pool.tensors, pool.stride_bytes, pool.offset_bytes, pool.row_bytes, strict=True)
    return [
        (tensor.data_ptr(), stride // word_bytes, offset // word_bytes, row // word_bytes)
        for tensor, stride, offset, row in sizes
    ]
