"""Cutting jobs into chunks, and chunks into runs of neighbouring pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.transfer.job import Chunk, Job, Pages


@dataclass(frozen=True)
class Geometry:
    """The two pools of a core, and the parts of their pages.

    Both hold pages of the same bytes: the rows of `layer_segments[i]` segments make up
    `layer_bytes[i]` bytes of layer i, layer after layer.
    """

    device_pages: int
    host_pages: int
    layer_bytes: tuple[int, ...]
    layer_segments: tuple[int, ...] = ()
    """Segments of each layer; one if not given."""

    def __post_init__(self) -> None:
        if not self.layer_segments:
            object.__setattr__(self, "layer_segments", (1,) * len(self.layer_bytes))
        if min(self.device_pages, self.host_pages) < 0 or not self.layer_bytes:
            raise TransferError(f"{self}: pools hold 0 pages or more, and pages at least one layer")
        if len(self.layer_segments) != len(self.layer_bytes) or min(self.layer_segments) < 1:
            raise TransferError(f"layer_segments={self.layer_segments}; pass 1 or more per layer")
        if min(self.layer_bytes) < 1:
            raise TransferError(f"layer_bytes={self.layer_bytes}; every layer has bytes")

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def page_bytes(self) -> int:
        return sum(self.layer_bytes)


Piece = tuple[int, int, int, int]
"""Pages [first, end) of a job in layers [first, end)."""


class Cutter:
    """Cuts jobs into chunks of at most `chunk_bytes`, which is at least a page."""

    def __init__(self, geometry: Geometry, chunk_bytes: int) -> None:
        self.page_bytes = geometry.page_bytes
        if chunk_bytes < self.page_bytes:
            raise TransferError(
                f"chunk_bytes={chunk_bytes} is less than a page of {self.page_bytes} bytes; a "
                "chunk is whole pages"
            )
        self.num_layers = geometry.num_layers
        self._chunk_bytes = chunk_bytes
        self._segments = (0, *accumulate(geometry.layer_segments))
        self._bytes = (0, *accumulate(geometry.layer_bytes))

    def pieces(self, job: Job) -> Iterator[Piece]:
        """All of the job, each byte once, in the order in which it is to be copied.

        Layer after layer if the job is layer-wise, with as many layers in a chunk as fit whole:
        cutting finer would make calls without making bytes come sooner.
        """
        if job.num_pages * self.page_bytes <= self._chunk_bytes:
            return iter([(0, job.num_pages, 0, self.num_layers)])
        if not job.layerwise:
            return self._cut_pages(job.num_pages, 0, self.num_layers)
        return self._cut_layers(job.num_pages)

    def num_bytes(self, piece: Piece) -> int:
        first_page, end_page, first, end = piece
        return (end_page - first_page) * (self._bytes[end] - self._bytes[first])

    def chunk(self, job: Job, piece: Piece, num_bytes: int, now_s: float) -> Chunk:
        first_page, end_page, first, end = piece
        return Chunk(
            job,
            first_page,
            job.source_pages[first_page:end_page],
            job.target_pages[first_page:end_page],
            self._segments[first],
            self._segments[end] - self._segments[first],
            first,
            end,
            num_bytes,
            now_s,
        )

    def _cut_pages(self, num_pages: int, first: int, end: int) -> Iterator[Piece]:
        step = self._chunk_bytes // (self._bytes[end] - self._bytes[first])
        for page in range(0, num_pages, step):
            yield page, min(page + step, num_pages), first, end

    def _cut_layers(self, num_pages: int) -> Iterator[Piece]:
        first = 0
        while first < self.num_layers:
            most = self._bytes[first] + self._chunk_bytes // num_pages
            end = first + 1
            while end < self.num_layers and self._bytes[end + 1] <= most:
                end += 1
            yield from self._cut_pages(num_pages, first, end)
            first = end


class Runs(NamedTuple):
    """Where runs of neighbouring pages start, and how long they are: int64[m] each."""

    starts: npt.NDArray[np.int64]
    num_pages: npt.NDArray[np.int64]


def page_runs(*page_ids: Pages) -> Runs:
    """The longest runs in which the ids, int32[n] with n >= 1, grow by one in every array given.

    Neighbours make one piece for a copy engine, where each piece costs a descriptor.
    """
    size = page_ids[0].size
    begins = np.zeros(size, np.bool_)
    begins[0] = True
    for ids in page_ids:
        begins[1:] |= ids[1:] - ids[:-1] != 1
    starts = np.flatnonzero(begins)
    num_pages = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=num_pages[:-1])
    num_pages[-1] = size - starts[-1]
    return Runs(starts, num_pages)


class Descriptors(NamedTuple):
    """Pieces for a copy engine: uint64[m] addresses and sizes in bytes."""

    source: npt.NDArray[np.uint64]
    target: npt.NDArray[np.uint64]
    num_bytes: npt.NDArray[np.uint64]


def descriptors(
    source_pages: Pages, source_base: int, target_pages: Pages, target_base: int, page_bytes: int
) -> Descriptors:
    """Copies between two areas of `page_bytes` per page, such as a host pool and a staging ring.

    A page's address is base + id * page_bytes; neighbours on both sides are one piece.
    """
    runs = page_runs(source_pages, target_pages)
    return Descriptors(
        _addresses(source_pages[runs.starts], source_base, page_bytes),
        _addresses(target_pages[runs.starts], target_base, page_bytes),
        runs.num_pages.astype(np.uint64) * np.uint64(page_bytes),
    )


def _addresses(pages: Pages, base: int, page_bytes: int) -> npt.NDArray[np.uint64]:
    found = pages.astype(np.uint64)
    found *= np.uint64(page_bytes)
    found += np.uint64(base)
    return found
