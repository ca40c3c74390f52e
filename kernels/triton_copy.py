"""`TritonCopy`: gather and scatter of pages by Triton kernels, checked before each launch."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd

from kvtier.errors import CopyError
from kvtier.kernels import triton_kernels as kernels
from kvtier.kernels.arguments import at_least_one, one_of
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.forms import Form, Shape, choose_form, make_shape
from kvtier.kernels.ids import Ids
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.tables import SegmentTables, upload
from kvtier.kernels.with_torch import Tensor, torch
from kvtier.kernels.with_triton import tl, triton

_KERNELS = {
    Form.PAGE: kernels.pages_copy,
    Form.SMALL: kernels.pages_copy_small,
    Form.PERSISTENT: kernels.pages_copy_persistent,
    Form.MIXED: kernels.pages_copy_mixed,
}
_ELEMENTS = {16: torch.int64, 4: torch.int32, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class ShippedKernel:
    """One compiled kernel that this package launches; what `perf.sass` and its tests look at."""

    name: str
    shape: Shape
    scatter: bool
    check: bool

    @property
    def function(self) -> triton.runtime.JITFunction:
        """The kernel before compilation."""
        return _KERNELS[self.shape.form]

    @property
    def constants(self) -> dict[str, int | bool]:
        """Its compile-time arguments by name."""
        return _constants(self.shape, scatter=self.scatter, check=self.check)


def _shipped() -> tuple[ShippedKernel, ...]:
    """Rows of usual models: pages of GQA (32 KB), MLA (18 KB), tokens (2 KB, 1152 and 656 B)."""
    shapes = [
        ("page-32k", make_shape(Form.PAGE, 32768, 16)),
        ("page-18k", make_shape(Form.PAGE, 18432, 16)),
        ("small-2k", make_shape(Form.SMALL, 2048, 16)),
        ("small-1152", make_shape(Form.SMALL, 1152, 16)),
        ("small-656", make_shape(Form.SMALL, 656, 16)),
        ("persistent-32k", make_shape(Form.PERSISTENT, 32768, 16)),
        ("mixed-18k", make_shape(Form.MIXED, 18432, 16)),
        ("page-word4", make_shape(Form.PAGE, 18436, 4)),
        ("small-word1", make_shape(Form.SMALL, 1153, 1)),
    ]
    return tuple(
        ShippedKernel(f"{name}-{'scatter' if s else 'gather'}{'-sum' if c else ''}", shape, s, c)
        for name, shape in shapes
        for s in (False, True)
        for c in (False, True)
    )


def _constants(shape: Shape, *, scatter: bool, check: bool) -> dict[str, int | bool]:
    sizes: dict[str, int | bool]
    if shape.form == Form.SMALL:
        sizes = {"ROW": shape.row, "WIDTH": shape.block, "PAGES": shape.pages}
    elif shape.form == Form.MIXED:
        sizes = {"BLOCK": shape.block}
    else:
        sizes = {"ROW": shape.row, "BLOCK": shape.block}
    return {**sizes, "UNIT": shape.unit, "SCATTER": scatter, "CHECK": check}


SHIPPED = _shipped()


def interpreted() -> bool:
    """Whether this process runs the kernels in Triton's interpreter, on CPU tensors.

    Triton decides by TRITON_INTERPRET when a kernel is decorated, so when this module is imported.
    """
    return not isinstance(kernels.pages_copy, triton.runtime.JITFunction)


class TritonCopy(CopyBackend):
    """Copies by Triton kernels on CUDA tensors, on the current stream (see CopyBackend).

    `form` forces one kernel; by default rows of 4 KiB and more take PAGE, shorter ones SMALL,
    different ones MIXED. `num_programs` bounds the programs of PERSISTENT, which runs only where
    it is forced: 8 programs of 16 KB in flight cover a PCIe 5 link by calculation. With
    TRITON_INTERPRET=1 in the environment of the process, CPU tensors are copied in the
    interpreter, and no others. Raises ConfigError for another form and less than one program.
    """

    name = "triton"

    def __init__(self, form: Form | str | None = None, num_programs: int = 8) -> None:
        self.form = one_of("form", Form, form)
        self.num_programs = at_least_one("num_programs", num_programs)
        self._tables = SegmentTables()

    def _check(self, pool: PagedPool) -> None:
        if interpreted() == isinstance(tl.sum, triton.runtime.JITFunction):
            raise CopyError(
                "TRITON_INTERPRET changed between the imports of triton and kvtier.kernels; set it "
                "in the environment of the process"
            )
        if pool.device.type == ("cpu" if interpreted() else "cuda"):
            return
        if interpreted():
            raise CopyError(
                f"the pool is on {pool.device}, Triton's interpreter reaches host memory only; "
                "unset TRITON_INTERPRET"
            )
        late = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
        raise CopyError(
            f"the pool is on {pool.device}, Triton copies CUDA tensors; use CpuCopy for host "
            "tensors" + (", or set TRITON_INTERPRET before triton is imported" if late else "")
        )

    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        # torch views a tensor in wider elements only where its offset is a multiple of them.
        word = pool.word_bytes(gcd(packed.data_ptr(), packed.storage_offset()))
        shape = self._shape(pool, word)
        if checksums is not None:
            checksums.zero_()
        table = self._tables.table(pool, word)
        sums = table if checksums is None else checksums
        pointers = (table, upload(ids, pool.device), packed.reshape(-1).view(_ELEMENTS[word]), sums)
        constants = _constants(shape, scatter=scatter, check=checksums is not None)
        on_gpu = pool.device.type == "cuda"
        with torch.cuda.device(pool.device) if on_gpu else nullcontext():
            self._launch(shape, pointers, len(ids), pool, constants)

    def _shape(self, pool: PagedPool, word: int) -> Shape:
        uniform = pool.uniform_row_bytes
        form = self.form if self.form is not None else choose_form(uniform)
        if uniform is None and form != Form.MIXED:
            raise CopyError(
                f"the {form.value} form needs rows of one length, the pool has "
                f"{sorted(set(pool.row_bytes))} bytes; use form=None or MIXED"
            )
        shape = make_shape(form, max(pool.row_bytes), word)
        if form == Form.SMALL and choose_form(uniform) != Form.SMALL:
            raise CopyError(f"rows of {uniform} bytes are too long for the small form; use PAGE")
        return shape

    def _launch(
        self,
        shape: Shape,
        pointers: tuple[Tensor, ...],
        num_pages: int,
        pool: PagedPool,
        constants: dict[str, int | bool],
    ) -> None:
        segments = pool.num_segments
        page_words = pool.page_bytes // shape.word_bytes
        blocks = triton.cdiv(max(pool.row_bytes) // shape.word_bytes, shape.block)
        sizes: tuple[int, ...] = (page_words,)
        grid: tuple[int, ...] = (num_pages, segments, blocks)
        if shape.form == Form.SMALL:
            grid, sizes = (triton.cdiv(num_pages, shape.pages), segments), (num_pages, page_words)
        elif shape.form == Form.PERSISTENT:
            grid = (min(self.num_programs, num_pages), 1)
            sizes = (num_pages, segments, page_words)
        kernel = _KERNELS[shape.form]
        kernel[grid](*pointers, *sizes, **constants, num_warps=shape.num_warps)
