"""`CupyCopy`: the copies of `TritonCopy` in CUDA C, written independently of it.

It is there to be compared with: in tests byte for byte, in benchmarks for speed.
"""

from __future__ import annotations

from typing import Any

from kvtier.kernels.arguments import at_least_one
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.cuda_source import KERNEL_NAME, SOURCE, Variant, make_geometry
from kvtier.kernels.cupy_device import check_cuda, load_cupy, on_current_stream
from kvtier.kernels.ids import Ids
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.tables import SegmentTables, upload
from kvtier.kernels.with_torch import Tensor


class CupyCopy(CopyBackend):
    """Copies by a CuPy RawKernel on CUDA tensors, on torch's current stream (see CopyBackend).

    Each variant is compiled at its first use on a device; CuPy keeps it on disk. `max_blocks`
    bounds the blocks of a launch; by default there is one for each piece of work. Raises
    ConfigError for less than one, CopyError at once without CuPy, NVRTC or a CUDA device.
    """

    name = "cupy"

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = None if max_blocks is None else at_least_one("max_blocks", max_blocks)
        self._cupy = load_cupy()
        self._kernels: dict[Variant, Any] = {}
        self._tables = SegmentTables()

    def _check(self, pool: PagedPool) -> None:
        check_cuda(pool.device)

    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        word_bytes = pool.word_bytes(packed.data_ptr())
        on_device = upload(ids, pool.device)
        if checksums is not None:
            checksums.zero_()
        geometry = make_geometry(
            len(ids), pool.num_segments, max(pool.row_bytes) // word_bytes, self.max_blocks
        )
        arguments = (
            self._tables.table(pool, word_bytes).data_ptr(),
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
