"""The host links of one worker, on the simulator's heap."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap
from kvtier.transfer.link import HostLink, LinkSpec


class Link:
    """What the engine submits its copies to.

    Each of `num_ranks` ranks has a link of its own and moves its share: one stands for all.
    """

    def __init__(self, heap: EventHeap, spec: LinkSpec, num_ranks: int = 1) -> None:
        self._one = HostLink(heap, spec)
        self._num_ranks = num_ranks
        self.moved_bytes = dict.fromkeys(Direction, 0)

    def submit(self, direction: Direction, num_bytes: int, done: Callable[[float], None]) -> None:
        """Queue a copy of `num_bytes` over all ranks; `done(now_s)` runs with its last byte."""
        self.moved_bytes[direction] += num_bytes
        self._one.submit(direction, num_bytes / self._num_ranks, done)
