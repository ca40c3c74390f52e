"""The numbers a scheduler is built with. Defaults carry their source; units are in the names."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Placement parameters (MORI section 4; margins and times are this project's choices)."""

    tick_s: float = 5.0
    """Period of Tick events, s (MORI section 4.1)."""
    window_k: int = 5
    """Cycles in the idleness ring (MORI section 6.1)."""
    swap_margin: float = 0.1
    """How much idler a resident must be than the held program that displaces it (iota)."""
    swap_margin_s: float = 5.0
    """The same for ELAPSED, whose rank is an age, s."""
    swap_min_gap_s: float = 2.0
    """A resident is displaced only after this long in its gap, s (87 % of calls are shorter)."""
    swap_when_idle: bool = False
    """Whether a worker that runs nothing swaps at once, margins set aside (not MORI's)."""
    dwell_s: float = 5.0
    """A program that moved less than this long ago is not displaced by a swap, s."""
    max_hold_s: float = 600.0
    """A request held longer than this makes its program next in line, margins set aside, s."""
    idle_expiry_s: float = 1800.0
    """A CPU-queue program whose gap is older than this loses its place first, s."""
    hbm_headroom: float = 0.02
    """Share of HBM the GPU queue leaves free for tokens produced between two ticks."""
    min_kept_share: float = 0.5
    """A CPU-queue program that keeps less than this share of its KV goes to waiting."""

    def __post_init__(self) -> None:
        _need("window_k", self.window_k, self.window_k >= 1, "at least 1")
        _need("tick_s", self.tick_s, self.tick_s > 0, "above 0")
        for name in ("swap_margin", "swap_margin_s", "swap_min_gap_s", "dwell_s", "max_hold_s"):
            _need(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _need("idle_expiry_s", self.idle_expiry_s, self.idle_expiry_s > 0, "above 0")
        _need("hbm_headroom", self.hbm_headroom, 0 <= self.hbm_headroom < 1, "in [0, 1)")
        _need("min_kept_share", self.min_kept_share, 0 <= self.min_kept_share <= 1, "in [0, 1]")


@dataclass(frozen=True, slots=True)
class ConcurSettings:
    """CONCUR's law (Eq 1) and what the paper leaves open (W0, bounds, interval, H window)."""

    alpha: float = 2.0
    """Additive increase, programs."""
    beta: float = 0.5
    """Multiplicative decrease."""
    u_low: float = 0.2
    """Locked share of HBM below which the window grows."""
    u_high: float = 0.5
    """Locked share of HBM above which a low hit rate cuts the window."""
    h_thresh: float = 0.2
    """Prefix hit rate below which the cache counts as thrashing."""
    initial_window: float = 16.0
    """W0, programs."""
    min_window: float = 1.0
    """Lower bound of W, programs; the upper bound is the number of live programs."""
    interval_s: float = 1.0
    """Shortest time between two judgements, s."""
    hit_window_s: float = 5.0
    """Length of the sliding window over which H is taken, s."""
    grow_on_hits: bool = False
    """`concur+`: grow while H is healthy and programs are held, whatever U is."""
    h_healthy: float = 0.8
    """`concur+`: the hit rate from which the cache counts as healthy."""

    def __post_init__(self) -> None:
        _need("alpha", self.alpha, self.alpha > 0, "above 0")
        _need("beta", self.beta, 0 < self.beta < 1, "in (0, 1)")
        _need("u_low", self.u_low, 0 <= self.u_low <= self.u_high, "in [0, u_high]")
        _need("u_high", self.u_high, self.u_high <= 1, "at most 1")
        _need("h_thresh", self.h_thresh, 0 <= self.h_thresh <= 1, "in [0, 1]")
        _need("h_healthy", self.h_healthy, self.h_thresh <= self.h_healthy <= 1, "in [h_thresh, 1]")
        _need("min_window", self.min_window, self.min_window >= 1, "at least 1")
        _need(
            "initial_window",
            self.initial_window,
            self.initial_window >= self.min_window,
            "at least min_window",
        )
        _need("interval_s", self.interval_s, self.interval_s > 0, "above 0")
        _need("hit_window_s", self.hit_window_s, self.hit_window_s > 0, "above 0")


def _need(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} must be {rule}")
