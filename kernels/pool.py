"""Where the pages of a pool lie, as every backend sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index

import numpy as np
import numpy.typing as npt

from kvtier.errors import CopyError
from kvtier.kernels.ids import check_num_pages
from kvtier.kernels.overlap import Rows, first_pair
from kvtier.kernels.with_torch import Tensor, torch

WORD_BYTES = (16, 4, 1)
"""Widths in which kernels count: 16 bytes wherever addresses allow, else their own compile."""


@dataclass(frozen=True, eq=False)
class PagedPool:
    """Segments of one pool: tensors whose first dimension is the page.

    Row `s` of page `p` is `tensors[s][p]`, `row_bytes[s]` contiguous bytes that start
    `stride_bytes[s] * p` bytes after the segment's base. A packed page is the rows of all segments
    one after the other, `page_bytes` in all; segment `s` begins at `offset_bytes[s]` in it.
    Elements are bytes to every copy: any dtype, mixed dtypes and mixed row sizes are fine.
    The tensors' memory must stay where it is: `tensor.data = ...` or a resized storage is not seen,
    and copies would go on in the memory that was there.
    """

    tensors: tuple[Tensor, ...]
    num_pages: int
    row_bytes: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    offset_bytes: tuple[int, ...]
    page_bytes: int
    _parts: dict[tuple[int, int], PagedPool] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> PagedPool:
        """A pool over existing tensors, without a copy; it keeps them alive.

        Raises CopyError when there is no tensor, when devices or page counts differ, when there
        are more than 2^31 - 1 pages, when a page's row is not contiguous or is empty, and when
        rows overlap, in one segment or between two.
        """
        segments = _tensors(tensors)
        first = segments[0]
        for at, tensor in enumerate(segments):
            _check_segment(at, tensor, first)
        rows = tuple(t[0].numel() * t.element_size() for t in segments)
        strides = tuple(t.stride(0) * t.element_size() for t in segments)
        ends = list(accumulate(rows))
        pool = cls(segments, first.shape[0], rows, strides, (0, *ends[:-1]), ends[-1])
        pool._check_apart()
        return pool

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

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The address of each segment's page 0."""
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    def segments(self, first: int, count: int) -> PagedPool:
        """The pool of `count` segments from `first` on; offsets stay those of the whole page.

        The same object every time, so that what backends keep for it serves again. Raises
        CopyError for segments that are not there.
        """
        try:
            first, count = index(first), index(count)
        except TypeError:
            raise CopyError(f"segments({first!r}, {count!r}); pass two integers") from None
        if not (first >= 0 and count >= 1 and first + count <= self.num_segments):
            raise CopyError(
                f"segments [{first}, {first + count}) are outside the pool's {self.num_segments}"
            )
        if count == self.num_segments:
            return self
        known = self._parts.get((first, count))
        return known or self._parts.setdefault((first, count), self._part(first, count))

    def word_bytes(self, packed_address: int) -> int:
        """The widest word that every address, stride, row and offset of a copy is a multiple of."""
        sizes = (*self.row_bytes, *self.stride_bytes, *self.offset_bytes, self.page_bytes)
        common = math.gcd(*sizes, *self.bases, packed_address)
        return next(width for width in WORD_BYTES if common % width == 0)

    def check_outside(self, name: str, tensor: Tensor) -> None:
        """Raise CopyError where a contiguous tensor on the pool's device is in the rows' memory."""
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        spans = self._spans
        if end <= spans.low or spans.high <= start or start == end:
            return
        # Of each segment, the first row that ends after the tensor begins.
        page = np.maximum(0, (start - spans.rows - spans.bases) // spans.strides + 1)
        within = (page < self.num_pages) & (spans.bases + page * spans.strides < end)
        if within.any():
            raise CopyError(
                f"{name} overlaps the memory of segment {int(np.argmax(within))}; pass memory of "
                "its own"
            )

    def _part(self, first: int, count: int) -> PagedPool:
        part = slice(first, first + count)
        return PagedPool(
            self.tensors[part],
            self.num_pages,
            self.row_bytes[part],
            self.stride_bytes[part],
            self.offset_bytes[part],
            self.page_bytes,
        )

    @cached_property
    def _spans(self) -> _Spans:
        bases, rows = np.array(self.bases, np.int64), np.array(self.row_bytes, np.int64)
        # The stride of a single page says nothing, and may be 0.
        strides = np.array(self.stride_bytes, np.int64) if self.num_pages > 1 else rows
        high = int((bases + (self.num_pages - 1) * strides + rows).max())
        return _Spans(bases, rows, strides, int(bases.min()), high)

    def _check_apart(self) -> None:
        if self.num_segments == 1 or self.device.type == "meta":
            return
        spans = self._spans
        lists = (spans.bases.tolist(), spans.rows.tolist(), spans.strides.tolist())
        rows = [Rows(b, self.num_pages, row, stride) for b, row, stride in zip(*lists, strict=True)]
        pair = first_pair(rows)
        if pair is not None:
            raise CopyError(f"segments {pair[0]} and {pair[1]} overlap; each needs its own memory")


@dataclass(frozen=True, eq=False, slots=True)
class _Spans:
    """Where the rows of each segment lie, in bytes; int64[segments], and the ends of them all."""

    bases: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    low: int
    high: int


def _tensors(given: Iterable[Tensor]) -> tuple[Tensor, ...]:
    if isinstance(given, Tensor):
        raise CopyError("a pool takes a list of tensors, one for each segment; pass [tensor]")
    try:
        tensors = tuple(given)
    except TypeError:
        raise CopyError(f"a pool takes a list of tensors, not a {type(given).__name__}") from None
    if not tensors:
        raise CopyError("a pool needs at least one segment; pass the tensors of its layers")
    return tensors


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise CopyError(f"{name} is of type {type(given).__name__}; pass a torch tensor")
    if given.layout != torch.strided or given.is_nested:
        raise CopyError(f"{name} is sparse or nested; pass a dense tensor")


def _check_segment(at: int, tensor: Tensor, first: Tensor) -> None:
    _check_tensor(f"segment {at}", tensor)
    if tensor.dim() < 2:
        raise CopyError(
            f"segment {at} has shape {tuple(tensor.shape)}; pass [pages, ...] with two or more"
        )
    if tensor.device != first.device:
        raise CopyError(f"segment {at} is on {tensor.device}, segment 0 on {first.device}")
    if tensor.shape[0] != first.shape[0]:
        raise CopyError(f"segment {at} has {tensor.shape[0]} pages, segment 0 has {first.shape[0]}")
    check_num_pages(tensor.shape[0])
    if tensor.shape[0] == 0 or tensor[0].numel() == 0:
        raise CopyError(f"segment {at} has shape {tuple(tensor.shape)}: nothing to copy in it")
    if not tensor[0].is_contiguous():
        raise CopyError(f"a page of segment {at} is not contiguous; strides {tensor.stride()}")
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor[0].numel():
        raise CopyError(f"pages of segment {at} overlap; strides {tensor.stride()}")


def check_packed(packed: Tensor, num_ids: int, pool: PagedPool) -> None:
    """Raise CopyError unless `packed` is contiguous uint8[num_ids, page_bytes] beside the pool."""
    _check_tensor("packed", packed)
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
    pool.check_outside("packed", packed)


def check_checksums(checksums: Tensor | None, packed: Tensor, pool: PagedPool) -> None:
    """Raise CopyError unless `checksums` is None or contiguous int64[n] beside pool and packed.

    `packed` has been checked, and has n rows.
    """
    if checksums is None:
        return
    _check_tensor("checksums", checksums)
    num_ids = packed.shape[0]
    if checksums.dtype != torch.int64 or tuple(checksums.shape) != (num_ids,):
        raise CopyError(
            f"checksums is {checksums.dtype}{tuple(checksums.shape)}; it must be int64({num_ids},)"
        )
    if not checksums.is_contiguous() or checksums.device != pool.device:
        raise CopyError(f"checksums must be contiguous and on {pool.device}")
    pool.check_outside("checksums", checksums)
    start, ahead = checksums.data_ptr(), checksums.data_ptr() - packed.data_ptr()
    if start and -checksums.nbytes < ahead < packed.nbytes:
        raise CopyError("checksums overlaps packed; pass memory of its own")
