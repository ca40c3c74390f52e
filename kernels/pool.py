"""Where the pages of a pool lie, as every backend sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvtier.errors import CopyError

WORD_BYTES = (16, 4, 1)
"""Widths in which kernels count: 16 bytes wherever addresses allow, else their own compile."""


@dataclass(frozen=True, eq=False)
class PagedPool:
    """Segments of one pool: tensors whose first dimension is the page.

    Row `s` of page `p` is `tensors[s][p]`, `row_bytes[s]` contiguous bytes that start
    `stride_bytes[s] * p` bytes after the segment's base. A packed page is the rows of all segments
    one after the other, `page_bytes` in all; segment `s` begins at `offset_bytes[s]` in it.
    Elements are bytes to every copy: any dtype, mixed dtypes and mixed row sizes are fine.
    """

    tensors: tuple[Tensor, ...]
    num_pages: int
    row_bytes: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    offset_bytes: tuple[int, ...]
    page_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PagedPool:
        """A pool over existing tensors, without a copy; it keeps them alive.

        Raises CopyError when there is no tensor, when devices or page counts differ, when a page's
        row is not contiguous, is empty or overlaps the next one.
        """
        if not tensors:
            raise CopyError("a pool needs at least one segment; pass the tensors of its layers")
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            _check_segment(index, tensor, first)
        rows = tuple(t[0].numel() * t.element_size() for t in tensors)
        strides = tuple(t.stride(0) * t.element_size() for t in tensors)
        ends = list(accumulate(rows))
        return cls(tuple(tensors), first.shape[0], rows, strides, (0, *ends[:-1]), ends[-1])

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def num_segments(self) -> int:
        return len(self.tensors)

    @property
    def uniform_row_bytes(self) -> int | None:
        """The row bytes of all segments where they are the same, else None."""
        return self.row_bytes[0] if len(set(self.row_bytes)) == 1 else None

    def segments(self, first: int, count: int) -> PagedPool:
        """The pool of `count` segments from `first` on; offsets stay those of the whole page."""
        if not (first >= 0 and count >= 1 and first + count <= self.num_segments):
            raise CopyError(
                f"segments [{first}, {first + count}) are outside the pool's {self.num_segments}"
            )
        part = slice(first, first + count)
        return PagedPool(
            self.tensors[part],
            self.num_pages,
            self.row_bytes[part],
            self.stride_bytes[part],
            self.offset_bytes[part],
            self.page_bytes,
        )

    def word_bytes(self, packed_address: int) -> int:
        """The widest word that every address, stride, row and offset of a copy is a multiple of."""
        sizes = (*self.row_bytes, *self.stride_bytes, *self.offset_bytes, self.page_bytes)
        addresses = (t.data_ptr() for t in self.tensors)
        common = math.gcd(*sizes, *addresses, packed_address)
        return next(width for width in WORD_BYTES if common % width == 0)


def _check_segment(index: int, tensor: Tensor, first: Tensor) -> None:
    if tensor.dim() < 2:
        raise CopyError(
            f"segment {index} has shape {tuple(tensor.shape)}; pass [pages, ...] with two or more"
        )
    if tensor.device != first.device:
        raise CopyError(f"segment {index} is on {tensor.device}, segment 0 on {first.device}")
    if tensor.shape[0] != first.shape[0]:
        raise CopyError(
            f"segment {index} has {tensor.shape[0]} pages, segment 0 has {first.shape[0]}"
        )
    if tensor.shape[0] == 0 or tensor[0].numel() == 0:
        raise CopyError(f"segment {index} has shape {tuple(tensor.shape)}: nothing to copy in it")
    if not tensor[0].is_contiguous():
        raise CopyError(f"a page of segment {index} is not contiguous; strides {tensor.stride()}")
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor[0].numel():
        raise CopyError(f"pages of segment {index} overlap; strides {tensor.stride()}")


def check_packed(packed: Tensor, num_ids: int, pool: PagedPool) -> None:
    """Raise CopyError unless `packed` is contiguous uint8[num_ids, page_bytes] beside the pool."""
    expected = (num_ids, pool.page_bytes)
    if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
        raise CopyError(
            f"packed is {packed.dtype}{tuple(packed.shape)}; it must be uint8{expected}, one row "
            "for each page id"
        )
    if not packed.is_contiguous():
        raise CopyError(f"packed is not contiguous; strides {packed.stride()}")
    if packed.device != pool.device:
        raise CopyError(f"packed is on {packed.device}, the pool on {pool.device}")


def check_checksums(checksums: Tensor | None, num_ids: int, pool: PagedPool) -> None:
    """Raise CopyError unless `checksums` is None or contiguous int64[num_ids] beside the pool."""
    if checksums is None:
        return
    if checksums.dtype != torch.int64 or tuple(checksums.shape) != (num_ids,):
        raise CopyError(
            f"checksums is {checksums.dtype}{tuple(checksums.shape)}; it must be int64({num_ids},)"
        )
    if not checksums.is_contiguous() or checksums.device != pool.device:
        raise CopyError(f"checksums must be contiguous and on {pool.device}")
