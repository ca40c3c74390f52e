"""Three ways to copy pages of a slab between numpy views of memory; see `CpuMethod`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import torch

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Words = npt.NDArray[Any]

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}
_INDEX_ROWS = 16 << 10  # rows per numpy call: keeps its index within the L2 cache
_TORCH_GRAIN = 32 << 10  # elements up to which torch stays on the calling thread


class CpuMethod(StrEnum):
    """How a slab is copied.

    FLAT: one numpy call over the rows of all segments, seen as one array of rows.
    RUNS: one numpy call per run of adjacent page ids.
    SEGMENTS: one call per segment, torch.index_select or an indexed assignment.
    """

    FLAT = "flat"
    RUNS = "runs"
    SEGMENTS = "segments"


@dataclass(frozen=True)
class Slab:
    """Consecutive segments with the same row and stride, one after the other in a packed page.

    Row s of page p is `row_bytes` bytes at `bases[s] + p * stride_bytes`; in a packed page it
    begins at `offset_bytes + s * row_bytes`. The memory belongs to the pool's tensors.
    """

    bases: tuple[int, ...]
    num_pages: int
    row_bytes: int
    stride_bytes: int
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one page."""
        return self.row_bytes * len(self.bases)

    def part(self, first: int, end: int) -> Slab:
        """Segments [first, end) alone."""
        offset = self.offset_bytes + first * self.row_bytes
        return replace(self, bases=self.bases[first:end], offset_bytes=offset)


def slabs_of(pool: PagedPool) -> list[Slab]:
    """The segments of a pool or of a part of one, grouped."""
    rows = zip(pool.row_bytes, pool.stride_bytes, pool.bases, pool.offset_bytes, strict=True)
    slabs = []
    for (row, stride), group in groupby(rows, key=lambda entry: entry[:2]):
        members = list(group)
        bases = tuple(base for _, _, base, _ in members)
        slabs.append(Slab(bases, pool.num_pages, row, stride, members[0][3]))
    return slabs


def flat_refusal(slab: Slab, packed: Bytes) -> str | None:
    """Why the slab cannot be copied FLAT, or None."""
    low, row = min(slab.bases), slab.row_bytes
    if packed.shape[1] != slab.num_bytes:
        return "its segments are not the whole page"
    if slab.stride_bytes % row or any((base - low) % row for base in slab.bases):
        return f"its rows do not lie at multiples of {row} bytes from the first"
    high = max(slab.bases) + (slab.num_pages - 1) * slab.stride_bytes + row
    start = packed.ctypes.data
    if start < high and low < start + packed.nbytes:
        return "packed lies between its segments"
    return None


Move = Callable[[Slab, Index, Bytes], None]
Moves = Mapping[CpuMethod, Move]


def _gather_flat(slab: Slab, ids: Index, packed: Bytes) -> None:
    rows, targets = _flat(slab, packed)
    for index, first, end in _flat_index(slab, ids):
        # mode="clip": numpy's default mode would copy the whole of `out`
        np.take(rows, index, axis=0, out=targets[first:end], mode="clip")


def _scatter_flat(slab: Slab, ids: Index, packed: Bytes) -> None:
    rows, sources = _flat(slab, packed)
    for index, first, end in _flat_index(slab, ids):
        rows[index] = sources[first:end]


def _gather_runs(slab: Slab, ids: Index, packed: Bytes) -> None:
    for rows, targets in _even_views(slab, packed):
        for page, first, end in _runs(ids):
            np.copyto(targets[first:end], rows[page : page + end - first])


def _scatter_runs(slab: Slab, ids: Index, packed: Bytes) -> None:
    for rows, sources in _even_views(slab, packed):
        for page, first, end in _runs(ids):
            np.copyto(rows[page : page + end - first], sources[first:end])


def _gather_segments(slab: Slab, ids: Index, packed: Bytes) -> None:
    for at in range(len(slab.bases)):
        rows, targets = _view(slab.part(at, at + 1), 0, packed)
        source, target = torch.from_numpy(rows[:, 0]), torch.from_numpy(targets[:, 0])
        num_pages = max(1, _TORCH_GRAIN // rows.shape[-1])
        for first in range(0, ids.size, num_pages):
            index = torch.from_numpy(ids[first : first + num_pages])
            torch.index_select(source, 0, index, out=target[first : first + num_pages])


def _scatter_segments(slab: Slab, ids: Index, packed: Bytes) -> None:
    for at in range(len(slab.bases)):
        rows, sources = _view(slab.part(at, at + 1), 0, packed)
        rows[ids, 0] = sources[:, 0]


GATHER: Moves = {
    CpuMethod.FLAT: _gather_flat,
    CpuMethod.RUNS: _gather_runs,
    CpuMethod.SEGMENTS: _gather_segments,
}
SCATTER: Moves = {
    CpuMethod.FLAT: _scatter_flat,
    CpuMethod.RUNS: _scatter_runs,
    CpuMethod.SEGMENTS: _scatter_segments,
}


def _flat(slab: Slab, packed: Bytes) -> tuple[Words, Words]:
    """All rows between the first and the last of the slab, and those of packed: [rows, words]."""
    low, row = min(slab.bases), slab.row_bytes
    width = _word_bytes(low, row, packed.ctypes.data)
    span = max(slab.bases) - low + (slab.num_pages - 1) * slab.stride_bytes + row
    rows = _words(low, (span // row, row // width), (row, width), width)
    return rows, packed.view(_WORDS[width]).reshape(-1, row // width)


def _flat_index(slab: Slab, ids: Index) -> Iterator[tuple[Index, int, int]]:
    """(rows of the pool, first row of packed, end) for some pages at a time."""
    bases = np.array(slab.bases, dtype=np.int64)
    firsts = (bases - bases.min()) // slab.row_bytes
    pages = ids * (slab.stride_bytes // slab.row_bytes)
    step = max(1, _INDEX_ROWS // firsts.size)
    for at in range(0, ids.size, step):
        index = (pages[at : at + step, None] + firsts).reshape(-1)
        first = at * firsts.size
        yield index, first, first + index.size


def _even_views(slab: Slab, packed: Bytes) -> Iterator[tuple[Words, Words]]:
    """Views of the slab and of packed, as [pages, segments, words], one pair per even group."""
    for group, step in even_groups(slab):
        yield _view(group, step, packed)


def even_groups(slab: Slab) -> list[tuple[Slab, int]]:
    """The slab in groups whose segments lie at a constant distance, with that distance in bytes.

    Inside one allocation the whole slab is one group.
    """
    groups = []
    first, count = 0, len(slab.bases)
    while first < count:
        end = min(first + 2, count)
        step = slab.bases[end - 1] - slab.bases[first]
        while end < count and slab.bases[end] - slab.bases[end - 1] == step:
            end += 1
        groups.append((slab.part(first, end), step))
        first = end
    return groups


def _view(group: Slab, step: int, packed: Bytes) -> tuple[Words, Words]:
    row, stride, num_segments = group.row_bytes, group.stride_bytes, len(group.bases)
    start = packed.ctypes.data + group.offset_bytes
    width = _word_bytes(group.bases[0], row, stride, step, start, packed.shape[1])
    num_words = row // width
    rows = _words(
        group.bases[0], (group.num_pages, num_segments, num_words), (stride, step, width), width
    )
    shape = (packed.shape[0], num_segments, num_words)
    return rows, _words(start, shape, (packed.shape[1], row, width), width)


def _word_bytes(*sizes: int) -> int:
    """The widest of 8, 4, 2, 1 that all sizes and addresses are multiples of."""
    return math.gcd(8, *sizes)


def _runs(ids: Index) -> Iterator[tuple[int, int, int]]:
    """(first page, first, end) of each stretch of `ids` in which every id is one above the last."""
    edges = (np.flatnonzero(np.diff(ids) != 1) + 1).tolist()
    for first, end in pairwise((0, *edges, ids.size)):
        yield int(ids[first]), first, end


@dataclass(frozen=True)
class _Memory:
    """What numpy needs to see memory as an array; whoever owns the memory must outlive the view."""

    __array_interface__: dict[str, Any]


def _words(address: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> Words:
    kind = np.dtype(_WORDS[width]).str
    interface = {
        "version": 3,
        "data": (address, False),
        "shape": shape,
        "strides": strides,
        "typestr": kind,
    }
    words: Words = np.asarray(_Memory(interface))
    return words
