"""From the flags of `kvtier replay` to the runs they ask for: all checks come before any run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvtier.config import Config, resolve
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.hardware import GpuSpec, kv_capacity_tokens, load_gpu
from kvtier.layout import ModelSpec, load_model
from kvtier.scheduling import (
    POLICIES,
    ConcurSettings,
    SchedulerSettings,
    admission_factory,
    split_policy,
)
from kvtier.scheduling import policy as find_policy
from kvtier.sim import CopyPath, EngineSettings, Gaps, Mode, SimSettings
from kvtier.traces import Trace, load, synth

_BOUND = "infinite"
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
# A closed loop draws new programs as slots become free: this many for each slot, then again.
_DRAWN_PER_SLOT = 2


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """What the command line gives; None is a flag that was not given."""

    path: Path | None
    profile: str | None
    policy: str
    admission: str
    model: str | None
    gpu: str | None
    tp: int | None
    workers: int
    programs: int | None
    mode: str | None
    duration: str | None
    dram_ratio: float | None
    gaps: str | None
    gap_cap: str | None
    seed: str | None
    seeds: int | None
    copy_path: str
    bound: bool
    config: Path | None


@dataclass(frozen=True, slots=True)
class Load:
    """Defaults that depend on the workload."""

    mode: str = "closed"
    model: str = "Qwen2.5-7B"
    gpu: str = "H200"
    tp: int = 1
    programs: int = 60


_LOADS: Mapping[str | None, Load] = {
    # CONCUR's Figure 6: Qwen3-32B, TP 2, a batch of 256.
    "batch-react": Load("batch", "Qwen3-32B", "H100", 2, 256)
}


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The runs, in order, with the trace that each seed replays."""

    runs: tuple[SimSettings, ...]
    traces: Mapping[int, Trace]
    hbm_tokens: int
    """KV that fits into one worker's HBM."""
    profile_defaults: tuple[str, ...]
    """Flags that the profile chose."""

    @property
    def first(self) -> SimSettings:
        """A run, for what all have in common."""
        return self.runs[0]

    @property
    def trace(self) -> Trace:
        """The first seed's trace."""
        return next(iter(self.traces.values()))

    @property
    def is_batch(self) -> bool:
        """Whether the makespan is what counts."""
        return self.first.mode is Mode.BATCH


def make_plan(flags: ReplayFlags) -> ReplayPlan:
    """Check everything that the flags name, load the trace, list the runs.

    Raises ConfigError, TraceError or CapacityError, one line each.
    """
    pairs = list_pairs(flags.policy, flags.admission, bound=flags.bound)
    config = _resolve(flags)
    seeds = _seeds(flags, config.replay.seed)
    defaults = _LOADS.get(flags.profile, Load())
    mode = _mode(flags.mode if flags.mode is not None else defaults.mode)
    _check_pointless(flags, mode, config)
    model = load_model(_given(flags.model, defaults.model))
    gpu = load_gpu(_given(flags.gpu, defaults.gpu))
    tp, programs = _given(flags.tp, defaults.tp), _given(flags.programs, defaults.programs)
    engine = config.engine
    hbm = kv_capacity_tokens(model, gpu, tp, engine.mem_fraction, page_size=engine.page_size)
    shared = _shared_settings(flags, config)
    traces = _traces(flags, mode, programs, seeds)
    if mode is Mode.OPEN:
        programs = sum(p.parent is None for p in next(iter(traces.values())).programs)
    load = {"model": model, "gpu": gpu, "tp": tp, "num_programs": programs, "mode": mode}
    runs = tuple(
        SimSettings(policy=policy, admission=admission, seed=seed, **load, **shared)
        for seed in seeds
        for policy, admission in pairs
    )
    return ReplayPlan(runs, traces, hbm, _chosen_by_profile(flags, defaults))


def list_pairs(policies: str, admissions: str, *, bound: bool) -> list[tuple[str, str]]:
    """(policy, admission) for every run of a seed, each once, the bound last.

    A policy with its admission attached (`mori+concur`) is combined with that one alone. Raises
    UnknownNameError or ConfigError.
    """
    wanted = _listed("--admission", admissions)
    for text in wanted:
        admission_factory(text)
    pairs: dict[tuple[str, str], None] = {}
    for text in _listed("--policy", policies):
        name, attached = (text, None) if text in POLICIES else split_policy(text)
        bound = bound or find_policy(name).unbounded
        if not POLICIES[name].unbounded:
            pairs |= {(name, admission): None for admission in ([attached] if attached else wanted)}
    return [*pairs, *([(_BOUND, "none")] if bound else [])]


def parse_seconds(flag: str, text: str) -> float:
    """Seconds in `90s`, `20m`, `1h` or a plain number of seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)([smh]?)", text.strip())
    if match is None:
        raise ConfigError(f"{flag} {text!r} is no time; write 90s, 20m, 1h, or a number of seconds")
    return float(match[1]) * _SECONDS[match[2]]


def _given[T](value: T | None, default: T) -> T:
    return default if value is None else value
