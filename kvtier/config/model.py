"""`Config`: every setting with its default, its range and the source of the default.

Papers cited: MORI (agentic KV placement by idleness), CONCUR (agent admission by additive increase
and multiplicative decrease), ThunderAgent (program-aware scheduling). "kvtier" marks a choice of
this project.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


def _setting(
    default: Any,
    description: str,
    source: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A field with its meaning and the source of its default; bounds as pydantic names them."""
    return Field(
        default=default,
        description=description,
        json_schema_extra={"source": source},
        gt=gt,
        ge=ge,
        lt=lt,
        le=le,
    )


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any) -> Any:
        """No setting is a truth value, and `true` for a number is a slip rather than a 1."""
        if isinstance(value, bool):
            raise ValueError("neither true nor false is a value here")
        return value


class SchedulerConfig(_Section):
    """Who sits where."""

    tick_s: float = _setting(
        5.0, "Period of the scheduler's tick, s", "MORI: 5 s router tick", gt=0
    )
    window_k: int = _setting(
        5, "Cycles that idleness looks back on", "MORI section 6.1: k = 5 in every experiment", ge=1
    )
    swap_margin: float = _setting(
        0.1,
        "How much more idle (0 to 1) a resident must be than the held program that displaces it",
        "kvtier: MORI section 4.3 asks for stickiness and gives no margin",
        ge=0,
        le=1,
    )
    swap_margin_s: float = _setting(
        5.0,
        "The same where programs are ranked by the age of their gap (policy elapsed), s",
        "kvtier: one tick",
        ge=0,
    )
    dwell_s: float = _setting(
        5.0,
        "Shortest stay in a tier before a swap moves a program again, s",
        "kvtier: one tick; MORI gives no dwell time",
        ge=0,
    )
    max_hold_s: float = _setting(
        600.0,
        "Longest hold of a request before its program is next in line, s",
        "kvtier: within usual client time-outs; ThunderAgent waits 1800 s",
        gt=0,
    )
    idle_expiry_s: float = _setting(
        1800.0,
        "Age of a gap after which a program in the CPU queue loses its place first, s",
        "kvtier: ThunderAgent's 1800 s limit, taken for gaps",
        gt=0,
    )
    hbm_headroom: float = _setting(
        0.02,
        "Share of HBM that the GPU queue leaves free for tokens produced between two ticks",
        "kvtier",
        ge=0,
        lt=1,
    )
    min_kept_share: float = _setting(
        0.5,
        "Share of its KV below which a program in the CPU queue goes to waiting",
        "kvtier",
        ge=0,
        le=1,
    )


class AdmissionConfig(_Section):
    """How many programs run: CONCUR's agent window."""

    alpha: float = _setting(2.0, "Additive increase of the window, programs", "CONCUR Eq 1", gt=0)
    beta: float = _setting(0.5, "Multiplicative decrease of the window", "CONCUR Eq 1", gt=0, lt=1)
    u_low: float = _setting(
        0.2, "Locked share of HBM below which the window grows", "CONCUR Eq 1", ge=0, le=1
    )
    u_high: float = _setting(
        0.5,
        "Locked share of HBM above which a low hit rate cuts the window",
        "CONCUR Eq 1",
        ge=0,
        le=1,
    )
    h_thresh: float = _setting(
        0.2, "Prefix hit rate below which the cache thrashes", "CONCUR Eq 1", ge=0, le=1
    )
    initial_window: float = _setting(
        16.0, "Window at the start, programs", "kvtier: perf/concur_sweep.py", ge=1
    )
    min_window: float = _setting(
        1.0, "Lower bound of the window, programs", "kvtier: perf/concur_sweep.py", ge=1
    )
    interval_s: float = _setting(
        1.0, "Shortest time between two judgements, s", "kvtier: perf/concur_sweep.py", gt=0
    )
    hit_window_s: float = _setting(
        5.0,
        "Length of the sliding window over which the hit rate is taken, s",
        "kvtier: perf/concur_sweep.py",
        gt=0,
    )

    h_healthy: float = _setting(
        0.8,
        "concur+: hit rate from which the window may grow while programs are held",
        "kvtier: perf/concur_sweep.py",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "AdmissionConfig":
        if self.h_thresh > self.h_healthy:
            raise ValueError(f"h_thresh={self.h_thresh} must not exceed h_healthy={self.h_healthy}")
        if self.u_low > self.u_high:
            raise ValueError(f"u_low={self.u_low} must not exceed u_high={self.u_high}")
        if self.min_window > self.initial_window:
            raise ValueError(
                f"min_window={self.min_window} must not exceed initial_window={self.initial_window}"
            )
        return self


class EngineConfig(_Section):
    """The engine that is simulated."""

    mem_fraction: float = _setting(
        0.88,
        "Share of HBM that holds weights and KV",
        "SGLang --mem-fraction-static on one 80 GB GPU",
        gt=0,
        le=1,
    )
    page_size: int = _setting(
        64, "Tokens per page", "SGLang HiCache best practices: --page-size 64", ge=1
    )
    chunk_tokens: int = _setting(
        8192, "Prefill tokens per batch", "SGLang --chunked-prefill-size on 80 GB", ge=1
    )
    max_running: int = _setting(
        256, "Most requests in one batch", "kvtier: the largest batch of CONCUR's Table 1", ge=1
    )


class ReplayConfig(_Section):
    """How a trace is replayed."""

    seed: int = _setting(0, "Seed of every random choice", "kvtier", ge=0)
    duration_s: float = _setting(
        3600.0, "Simulated time, s", "MORI section 6.1: one-hour runs", gt=0
    )
    gaps: Literal["capped", "tool", "raw"] = _setting(
        "capped",
        "Gaps between calls: all cut at gap_cap_s, tool gaps alone, or as recorded",
        "kvtier: raw human gaps empty the load",
    )
    gap_cap_s: float = _setting(
        60.0,
        "Longest gap when gaps are capped, s",
        "kvtier: three times MORI's P99 tool gap of 20 s",
        gt=0,
    )
    dram_ratio: float = _setting(
        1.0, "DRAM for KV as a multiple of HBM for KV", "MORI section 6.1: 1x and 2x", ge=0
    )


class Config(_Section):
    """All settings. Keys are written `section.name`."""

    scheduler: SchedulerConfig = SchedulerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    engine: EngineConfig = EngineConfig()
    replay: ReplayConfig = ReplayConfig()
