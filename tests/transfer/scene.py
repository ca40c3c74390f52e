"""Small real pools on both sides of a CPU engine, and what their bytes must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvtier.ids import Direction
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.host_pool import HostPool
from kvtier.memory.pages import PageAllocator

Bytes = npt.NDArray[np.uint8]

LAYERS = ((48, 16), (7,), (33, 33))
"""Bytes of each segment's row, layer by layer: even, odd, of several sizes."""
ROWS = tuple(row for layer in LAYERS for row in layer)
_ENDS = [*accumulate(map(len, LAYERS))]
SEGMENTS = [range(end - len(layer), end) for end, layer in zip(_ENDS, LAYERS, strict=True)]
"""Indices of each layer's segments."""
PAGE_BYTES = sum(ROWS)
_GAP = 5  # bytes after each row that belong to nobody
_GAP_FILL = 0xA5


@dataclass(eq=False)
class Side:
    """The pages of one tier: what they hold, and what they must hold where `valid`."""

    pages: PageAllocator
    segments: Sequence[Bytes]
    """uint8[num_pages, row bytes] each, views of the real memory; a page is one row of each."""
    expected: Bytes
    valid: npt.NDArray[np.bool_]
    """Per byte. What a copy is moving, or lost on the way, is not."""

    @classmethod
    def over(cls, pages: PageAllocator, segments: Sequence[Bytes]) -> Side:
        size = (pages.num_pages, PAGE_BYTES)
        side = cls(pages, segments, np.zeros(size, np.uint8), np.ones(size, np.bool_))
        side.write(range(pages.num_pages), side.expected)
        return side

    def read(self, pages: Iterable[int]) -> Bytes:
        """uint8[n, PAGE_BYTES]: what is there."""
        ids = list(pages)
        return np.concatenate([segment[ids] for segment in self.segments], axis=1)

    def write(self, pages: Iterable[int], content: Bytes) -> None:
        """What an engine's compute does, or whoever owns the pages."""
        ids, begin = list(pages), 0
        for segment in self.segments:
            segment[ids] = content[:, begin : begin + segment.shape[1]]
            begin += segment.shape[1]
        self.expect(ids, content)

    def expect(self, pages: list[int], content: Bytes) -> None:
        self.expected[pages] = content
        self.valid[pages] = True

    def compare(self) -> None:
        """Every byte is what it must be, in pages that nobody has as well."""
        found = np.concatenate(self.segments, axis=1)
        wrong = (found != self.expected) & self.valid
        assert not wrong.any(), f"bytes differ on (page, byte) {np.argwhere(wrong)[0]}"


@dataclass(eq=False)
class Copy:
    """Pages of one side with one owner, and what they hold."""

    owner: int
    side: Side
    pages: list[int]
    content: Bytes


class Pools:
    """A device pool with a gap after every row, a page-first host pool, and their sides."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self._wide = [
            torch.full((device_pages, row + _GAP), _GAP_FILL, dtype=torch.uint8) for row in ROWS
        ]
        rows = iter(wide[:, :row] for wide, row in zip(self._wide, ROWS, strict=True))
        self.device_pool = DevicePool.adopt([[next(rows) for _ in layer] for layer in LAYERS])
        self.host_pool = HostPool.allocate(host_pages, PAGE_BYTES)
        device_rows = [tensor.numpy() for tensor in self.device_pool.pool.tensors]
        ends = np.cumsum(ROWS)
        host = self.host_pool.packed.numpy()
        host_rows = [host[:, end - row : end] for end, row in zip(ends, ROWS, strict=True)]
        self.device = Side.over(self.device_pool.pages, device_rows)
        self.host = Side.over(self.host_pool.pages, host_rows)

    def source(self, direction: Direction) -> Side:
        return self.device if direction is Direction.D2H else self.host

    def target(self, direction: Direction) -> Side:
        return self.host if direction is Direction.D2H else self.device

    def compare(self) -> None:
        """Bytes of both sides."""
        self.device.compare()
        self.host.compare()

    def compare_gaps(self) -> None:
        """The bytes between the rows, which belong to nobody."""
        for wide, row in zip(self._wide, ROWS, strict=True):
            assert bool((wide[:, row:] == _GAP_FILL).all()), "a copy wrote beside its row"

    def close(self) -> None:
        self.host_pool.close()


def pattern(owner: int, generation: int, num_pages: int) -> Bytes:
    """Bytes that no other owner, generation or page has."""
    seed = np.random.default_rng((owner, generation))
    return seed.integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


def take(side: Side, num_pages: int) -> list[int]:
    """Pages that must be there."""
    pages = side.pages.take(num_pages)
    assert pages is not None, f"{num_pages} pages asked for, {side.pages.num_free} are free"
    return pages.tolist()
