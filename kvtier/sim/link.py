"""The host link of one worker: how fast KV moves between HBM and DRAM.

Figures: vLLM PR #42212 (batched DMA by descriptor size and count, H100), FlexKV #193 (cost of one
asynchronous copy), vLLM's offloading post of 2026-01-08 (both directions at once).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap


class CopyPath(StrEnum):
    """How scattered pages cross the link."""

    STAGED = "staged"
    BATCH_DMA = "batch-dma"
    PER_PAGE = "per-page"


# Gather and scatter run at HBM speed beside the DMA: about 2.6 % of the link time each.
_STAGING_SHARE = 0.026
# One asynchronous copy costs this long to issue, s (FlexKV #193: 2.3 us on H20).
_COPY_CALL_S = 2.3e-6
_KIB = 1024
# Host-to-device GB/s of one batched call by descriptor size, at 10,000 and at 100,000 descriptors.
_BATCH_SIZES = (4 * _KIB, 8 * _KIB, 16 * _KIB, 24 * _KIB, 28 * _KIB, 64 * _KIB)
_BATCH_10K = (6.8, 6.8, 7.1, 25.8, 27.5, 38.8)
_BATCH_100K = (3.8, 5.3, 6.3, 6.9, 44.1, 51.8)


def copy_bytes_per_s(
    path: CopyPath, direction: Direction, fragment_bytes: int, count: int, link_bytes_per_s: float
) -> float:
    """Speed of one copy of `count` fragments over an otherwise idle link, bytes/s.

    Small descriptors fall off a cliff in batched host-to-device copies below 28 KiB; the other
    direction stays at link speed. Never faster than the link.
    """
    if path is CopyPath.STAGED:
        return link_bytes_per_s * (1.0 - _STAGING_SHARE)
    if path is CopyPath.PER_PAGE:
        return min(fragment_bytes / _COPY_CALL_S, link_bytes_per_s)
    if direction is Direction.D2H:
        return link_bytes_per_s
    weight = min(max(math.log10(max(count, 1) / 1e4), 0.0), 1.0)
    few, many = _at(_BATCH_10K, fragment_bytes), _at(_BATCH_100K, fragment_bytes)
    return min((few * (1.0 - weight) + many * weight) * 1e9, link_bytes_per_s)


def _at(speeds: tuple[float, ...], fragment_bytes: int) -> float:
    """GB/s at a fragment size: linear between the measured sizes, flat beyond them."""
    index = bisect_right(_BATCH_SIZES, fragment_bytes)
    if index == 0:
        return speeds[0]
    if index == len(_BATCH_SIZES):
        return speeds[-1]
    low, high = _BATCH_SIZES[index - 1], _BATCH_SIZES[index]
    share = (fragment_bytes - low) / (high - low)
    return speeds[index - 1] * (1.0 - share) + speeds[index] * share


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a link is made of. Fragments are bytes of one page in one segment."""

    path: CopyPath
    fragment_bytes: int
    one_way_bytes_per_s: float
    duplex_bytes_per_s: float
    """Sum of both directions when both are busy."""
    num_ranks: int = 1
    """Each rank has a link of its own and moves its share: one stands for all."""


@dataclass(slots=True)
class _Transfer:
    left_bytes: float
    bytes_per_s: float
    done: Callable[[float], None]


class Link:
    """Two FIFO channels, one per direction, that slow each other down while both are busy."""

    def __init__(self, heap: EventHeap, spec: LinkSpec) -> None:
        self._heap = heap
        self._spec = spec
        self._channels: dict[Direction, deque[_Transfer]] = {d: deque() for d in Direction}
        self._updated_s = 0.0
        self._version = 0
        self.moved_bytes = dict.fromkeys(Direction, 0)

    def submit(self, direction: Direction, num_bytes: int, done: Callable[[float], None]) -> None:
        """Queue a copy of `num_bytes` over all ranks; `done(now_s)` runs with its last byte."""
        spec = self._spec
        rank_bytes = num_bytes / spec.num_ranks
        count = math.ceil(rank_bytes / spec.fragment_bytes)
        speed = copy_bytes_per_s(
            spec.path, direction, spec.fragment_bytes, count, spec.one_way_bytes_per_s
        )
        self._advance(self._heap.now_s)
        self._channels[direction].append(_Transfer(rank_bytes, speed, done))
        self.moved_bytes[direction] += num_bytes
        self._schedule()

    def _share(self) -> float:
        """Factor on each direction's speed: both busy share the duplex sum evenly."""
        if not all(self._channels.values()):
            return 1.0
        return min(self._spec.duplex_bytes_per_s / (2.0 * self._spec.one_way_bytes_per_s), 1.0)

    def _advance(self, now_s: float) -> None:
        elapsed_s, share = now_s - self._updated_s, self._share()
        for channel in self._channels.values():
            if channel:
                channel[0].left_bytes -= elapsed_s * channel[0].bytes_per_s * share
        self._updated_s = now_s

    def _schedule(self) -> None:
        self._version += 1
        version, share = self._version, self._share()
        heads = [channel[0] for channel in self._channels.values() if channel]
        if heads:
            next_s = min(max(t.left_bytes, 0.0) / (t.bytes_per_s * share) for t in heads)
            self._heap.at(self._updated_s + next_s, lambda now_s: self._complete(now_s, version))

    def _complete(self, now_s: float, version: int) -> None:
        if version != self._version:
            return
        self._advance(now_s)
        # Less than a byte left is rounding.
        channels = self._channels.values()
        finished = [c.popleft() for c in channels if c and c[0].left_bytes < 1.0]
        self._schedule()
        for transfer in finished:
            transfer.done(now_s)
