"""Idleness: how much of its recent life a program spent outside the GPU (MORI section 4.1)."""

from __future__ import annotations

from collections import deque

from kvtier.errors import ConfigError


class IdlenessRing:
    """The last `window` cycles of one program, a cycle being one inference and the gap after it.

    iota(now) = (acting + age) / (reasoning + acting + age), in [0, 1], where `acting` and
    `reasoning` are sums in seconds over the ring and `age` is how long the running gap has lasted.
    Time in which the gateway holds the program enters neither term. An empty ring gives 0.
    A clock that steps back adds no time.
    """

    __slots__ = ("_acting_s", "_acting_since_s", "_cycles", "_reasoning_s", "_window")

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ConfigError(f"window={window} cycles; it must be at least 1")
        self._window = window
        self._cycles: deque[tuple[float, float]] = deque()
        self._acting_since_s: float | None = None
        self._reasoning_s = 0.0
        self._acting_s = 0.0

    def inference_ended(self, reasoning_s: float, now_s: float) -> None:
        """Open a cycle whose inference took `reasoning_s`; the gap after it starts at `now_s`."""
        self.gap_ended(now_s)
        self._cycles.append((max(reasoning_s, 0.0), 0.0))
        if len(self._cycles) > self._window:
            self._cycles.popleft()
        self._acting_since_s = now_s
        self._sum()

    def gap_ended(self, now_s: float) -> None:
        """Close the running gap, if any. What follows until the next inference is held time."""
        if self._acting_since_s is None:
            return
        reasoning_s, acting_s = self._cycles[-1]
        self._cycles[-1] = (reasoning_s, acting_s + self.gap_age_s(now_s))
        self._acting_since_s = None
        self._sum()

    def gap_resumed(self, now_s: float) -> None:
        """What the program was held for is off: the gap goes on, without the held time."""
        if self._cycles:
            self._acting_since_s = now_s
        else:
            self.inference_ended(0.0, now_s)

    def gap_age_s(self, now_s: float) -> float:
        """Seconds the running gap has lasted; 0 when no gap runs."""
        if self._acting_since_s is None:
            return 0.0
        return max(now_s - self._acting_since_s, 0.0)

    def value(self, now_s: float) -> float:
        """Iota at `now_s`, in [0, 1]."""
        acting_s = self._acting_s + self.gap_age_s(now_s)
        total_s = self._reasoning_s + acting_s
        return acting_s / total_s if total_s > 0.0 else 0.0

    def _sum(self) -> None:
        # Summed afresh, so that no rounding residue survives the cycles that caused it.
        self._reasoning_s = sum(reasoning for reasoning, _ in self._cycles)
        self._acting_s = sum(acting for _, acting in self._cycles)
