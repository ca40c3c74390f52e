"""The simulator's clock: a heap of callbacks ordered by (time, priority, sequence)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[float], None]


class EventHeap:
    """Time in seconds. Equal times run by priority, then in the order in which they were added."""

    __slots__ = ("_heap", "_sequence", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._sequence = 0
        self.now_s = 0.0

    def at(self, time_s: float, action: Action, priority: int = 0) -> None:
        """Run `action(time_s)` at `time_s`, which must not lie in the past."""
        assert time_s >= self.now_s, f"{time_s} s lies before {self.now_s} s"
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, action))

    def step(self, until_s: float) -> bool:
        """Run the next event if it is due by `until_s`; False when there is none."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now_s, _, _, action = heappop(self._heap)
        action(self.now_s)
        return True
