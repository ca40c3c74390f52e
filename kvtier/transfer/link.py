"""A model of the host link: how fast KV moves between HBM and DRAM.

Sans-IO: it runs on a clock and a heap of callbacks that the caller owns. Figures: vLLM PR #42212
(batched DMA by descriptor size and count, H100), FlexKV #193 (cost of one asynchronous copy),
vLLM's offloading post of 2026-01-08 (both directions at once), NVIDIA forum 365145 (copies of one
direction take turns in one copy engine, from however many streams they come). It loses no speed
beyond these: more copies in flight make none of them dearer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.ids import Direction


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


class Heap(Protocol):
    """A clock and what happens when: `kvtier.sim.heap.EventHeap` is one."""

    @property
    def now_s(self) -> float:
        """The time of the event that runs, s."""

    def at(self, time_s: float, action: Callable[[float], None]) -> None:
        """Run `action(time_s)` at `time_s`."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a link is made of. Fragments are bytes of one page in one segment."""

    path: CopyPath
    fragment_bytes: int
    one_way_bytes_per_s: float
    duplex_bytes_per_s: float
    """Sum of both directions when both are busy."""


def copy_bytes_per_s(
    path: CopyPath, direction: Direction, fragment_bytes: int, count: int, link_bytes_per_s: float
) -> float:
    """Speed of one copy of `count` fragments over an otherwise idle link, bytes/s.

    Small descriptors fall off a cliff in batched host-to-device copies below 28 KiB; the other
    direction stays at link speed. Never faster than the link.
    """
    own = _own_bytes_per_s(path, direction, fragment_bytes, count)
    return min(own, link_bytes_per_s * _payload_share(path))


def _own_bytes_per_s(
    path: CopyPath, direction: Direction, fragment_bytes: int, count: int
) -> float:
    """Bound that issuing and descriptors set, whatever the link, bytes/s; infinity for none."""
    if path is CopyPath.PER_PAGE:
        return fragment_bytes / _COPY_CALL_S
    if path is CopyPath.STAGED or direction is Direction.D2H:
        return math.inf
    weight = min(max(math.log10(max(count, 1) / 1e4), 0.0), 1.0)
    few, many = _at(_BATCH_10K, fragment_bytes), _at(_BATCH_100K, fragment_bytes)
    return (few * (1.0 - weight) + many * weight) * 1e9


def _payload_share(path: CopyPath) -> float:
    """Share of a copy's link time in which payload crosses the link."""
    return 1.0 - _STAGING_SHARE if path is CopyPath.STAGED else 1.0


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


def max_min(demands: Sequence[float], capacity: float) -> list[float]:
    """Shares of `capacity`: as even as can be, none above its demand, nothing left over in need."""
    shares = [0.0] * len(demands)
    left = capacity
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for place, index in enumerate(order):
        shares[index] = min(demands[index], left / (len(order) - place))
        left -= shares[index]
    return shares


@dataclass(slots=True)
class _Copy:
    left_bytes: float
    own_bytes_per_s: float
    done: Callable[[float], None]
    bytes_per_s: float = 0.0
    """What it gets at present; 0 while it waits for its turn."""


class HostLink:
    """One link that the copy engines of `num_ranks` GPUs share.

    A rank has one copy engine per direction: its copies of that direction run one after the other,
    in the order of `submit`. Copies that run at the same time share the link: both directions the
    duplex sum, the ranks of a direction what that direction gets, each as evenly as their own
    bounds allow.
    """

    def __init__(self, heap: Heap, spec: LinkSpec, num_ranks: int = 1) -> None:
        assert num_ranks >= 1, f"a link of {num_ranks} ranks; use >= 1"
        self._heap = heap
        self._spec = spec
        self._payload_share = _payload_share(spec.path)
        self._engines: dict[Direction, list[deque[_Copy]]] = {
            direction: [deque() for _ in range(num_ranks)] for direction in Direction
        }
        self._updated_s = 0.0
        self._version = 0

    def submit(
        self,
        direction: Direction,
        num_bytes: float,
        done: Callable[[float], None],
        *,
        rank: int = 0,
    ) -> None:
        """Queue a copy; `done(now_s)` runs with its last byte.

        Its fragments are one call's descriptors: `num_bytes` over the fragment's bytes.
        """
        spec = self._spec
        count = math.ceil(num_bytes / spec.fragment_bytes)
        own = _own_bytes_per_s(spec.path, direction, spec.fragment_bytes, count)
        self._advance(self._heap.now_s)
        self._engines[direction][rank].append(_Copy(num_bytes, own, done))
        self._schedule()

    def _running(self, direction: Direction) -> list[_Copy]:
        return [copies[0] for copies in self._engines[direction] if copies]

    def _share(self) -> list[_Copy]:
        """Give every running copy its speed."""
        spec, payload = self._spec, self._payload_share
        running = [self._running(direction) for direction in Direction]
        demands = [[copy.own_bytes_per_s / payload for copy in copies] for copies in running]
        ways = [min(sum(demand), spec.one_way_bytes_per_s) for demand in demands]
        for copies, demand, way in zip(
            running, demands, max_min(ways, spec.duplex_bytes_per_s), strict=True
        ):
            for copy, speed in zip(copies, max_min(demand, way), strict=True):
                copy.bytes_per_s = speed * payload
        return [copy for copies in running for copy in copies]

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._updated_s
        for direction in Direction:
            for copy in self._running(direction):
                copy.left_bytes -= elapsed_s * copy.bytes_per_s
        self._updated_s = now_s

    def _schedule(self) -> None:
        self._version += 1
        version, running = self._version, self._share()
        if running:
            next_s = min(max(copy.left_bytes, 0.0) / copy.bytes_per_s for copy in running)
            self._heap.at(self._updated_s + next_s, lambda now_s: self._complete(now_s, version))

    def _complete(self, now_s: float, version: int) -> None:
        if version != self._version:
            return
        self._advance(now_s)
        # Less than a byte left is rounding.
        finished = [
            copies.popleft()
            for engines in self._engines.values()
            for copies in engines
            if copies and copies[0].left_bytes < 1.0
        ]
        self._schedule()
        for copy in finished:
            copy.done(now_s)
