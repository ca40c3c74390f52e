"""How many programs, or requests, a worker may run at once."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.scheduling.events import EngineStats
from kvtier.scheduling.settings import ConcurSettings


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker's window is judged against, in programs."""

    num_active: int
    num_held: int
    num_live: int


class Admission:
    """Bounds per worker. The base class bounds nothing."""

    name = "none"

    def program_window(self, worker: str) -> float:
        """Largest number of programs in the worker's GPU queue; infinity when unbounded."""
        del worker
        return math.inf

    def request_window(self, worker: str) -> float:
        """Largest number of requests running on the worker; infinity when unbounded."""
        del worker
        return math.inf

    def observe(self, stats: EngineStats, load: Load, now_s: float) -> bool:
        """Take a worker's counters; True when its window changed."""
        del stats, load, now_s
        return False

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        del worker


class NoAdmission(Admission):
    """Everything runs."""


class FixedWindow(Admission):
    """A constant agent cap (CONCUR section 5's "levels")."""

    def __init__(self, num_programs: int) -> None:
        if num_programs < 1:
            raise ConfigError(f"a fixed window of {num_programs} programs admits nobody; use >= 1")
        self.name = f"fixed:{num_programs}"
        self._num_programs = num_programs

    def program_window(self, worker: str) -> float:
        del worker
        return self._num_programs


class RequestCap(Admission):
    """A constant cap on running requests (CONCUR section 5's request-level baseline)."""

    def __init__(self, num_requests: int) -> None:
        if num_requests < 1:
            raise ConfigError(f"a cap of {num_requests} requests admits nobody; use >= 1")
        self.name = f"request-cap:{num_requests}"
        self._num_requests = num_requests

    def request_window(self, worker: str) -> float:
        del worker
        return self._num_requests


@dataclass(slots=True)
class _Window:
    size: float
    judged_s: float
    grown_s: float = -math.inf
    cut_pending: bool = False
    samples: deque[tuple[float, int, int]] = field(default_factory=deque)


class Concur(Admission):
    """The AIMD window of CONCUR (Eq 1, section 4.3), one per worker.

    U < u_low: W += alpha. U > u_high and H < h_thresh: W *= beta. Otherwise W holds. U is the share
    of HBM locked by running requests, H the share of prompt tokens found cached over the last
    `hit_window_s` seconds; without a prefill in that time H is unknown and cuts nothing.
    After a cut nothing is judged until no more than W programs are active, and H is then taken
    afresh: one congestion, one cut. W grows up to the number of live programs and is cut from no
    more than that, down to min_window.
    """

    def __init__(self, settings: ConcurSettings | None = None) -> None:
        self._settings = settings if settings is not None else ConcurSettings()
        self._windows: dict[str, _Window] = {}
        self.num_cuts = 0
        self.name = "concur+" if self._settings.grow_on_hits else "concur"

    def program_window(self, worker: str) -> float:
        window = self._windows.get(worker)
        return math.floor(window.size if window is not None else self._settings.initial_window)

    def forget(self, worker: str) -> None:
        self._windows.pop(worker, None)

    def hit_rate(self, worker: str) -> float | None:
        """H in [0, 1] over the sliding window; None when it saw no prefill."""
        window = self._windows.get(worker)
        if window is None or len(window.samples) < 2:
            return None
        _, first_prompt, first_cached = window.samples[0]
        _, last_prompt, last_cached = window.samples[-1]
        if last_prompt == first_prompt:
            return None
        return (last_cached - first_cached) / (last_prompt - first_prompt)

    def observe(self, stats: EngineStats, load: Load, now_s: float) -> bool:
        window = self._windows.get(stats.worker)
        if window is None:
            window = _Window(self._settings.initial_window, now_s)
            self._windows[stats.worker] = window
        self._sample(window, stats, now_s)
        if window.cut_pending:
            if load.num_active > math.floor(window.size):
                return False
            window.cut_pending = False
            window.samples.clear()
            self._sample(window, stats, now_s)
        if now_s - window.judged_s < self._settings.interval_s:
            return False
        window.judged_s = now_s
        return self._judge(window, stats, load)

    def _sample(self, window: _Window, stats: EngineStats, now_s: float) -> None:
        window.samples.append((now_s, stats.prompt_tokens, stats.cached_tokens))
        while (
            len(window.samples) > 2 and window.samples[1][0] <= now_s - self._settings.hit_window_s
        ):
            window.samples.popleft()

    def _judge(self, window: _Window, stats: EngineStats, load: Load) -> bool:
        law, before = self._settings, window.size
        usage = stats.locked_tokens / stats.capacity_tokens
        hits = self.hit_rate(stats.worker)
        grows = usage < law.u_low or (law.grow_on_hits and self._may_grow(window, hits, load))
        if usage > law.u_high and hits is not None and hits < law.h_thresh:
            binding = min(before, float(max(load.num_live, 1)))
            window.size = max(binding * law.beta, law.min_window)
            window.cut_pending = window.size < before
            self.num_cuts += window.cut_pending
        elif grows:
            window.size = max(min(before + law.alpha, float(load.num_live)), before)
            window.grown_s = window.judged_s
        return math.floor(window.size) != math.floor(before)

    def _may_grow(self, window: _Window, hits: float | None, load: Load) -> bool:
        """`concur+`: the window binds, and what its last growth did to H has been seen."""
        law = self._settings
        binds = load.num_held > 0 and load.num_active >= math.floor(window.size)
        seen = window.judged_s - window.grown_s >= law.hit_window_s
        return binds and seen and hits is not None and hits >= law.h_healthy
