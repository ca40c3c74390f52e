"""From the flags of `kvtier replay` to the runs they ask for: all checks come before any run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvtier.cli.drawing import draw
from kvtier.cli.replay_options import MOST_SEEDS
from kvtier.config import Config, resolve
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.hardware import kv_capacity_tokens, load_gpu
from kvtier.layout import load_model
from kvtier.scheduling import (
    POLICIES,
    ConcurSettings,
    SchedulerSettings,
    admission_factory,
    split_policy,
)
from kvtier.scheduling import policy as find_policy
from kvtier.sim import CopyPath, Gaps, Mode, SimSettings
from kvtier.sim.request import EngineSettings
from kvtier.traces import Trace, load

_T = TypeVar("_T")
_BOUND = "infinite"
_DURATION_S = (1.0, 30 * 86_400.0)
_LARGEST_SEED = 2**63 - 1
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
    load = shared | {"model": model, "gpu": gpu, "tp": tp, "num_programs": programs, "mode": mode}
    runs = tuple(
        SimSettings(policy=policy, admission=admission, seed=seed, **load)
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
        spec = find_policy(name)
        bound = bound or spec.unbounded
        if not spec.unbounded:
            pairs |= {(name, admission): None for admission in ([attached] if attached else wanted)}
    return [*pairs, *([(_BOUND, "none")] if bound else [])]


def parse_seconds(flag: str, text: str) -> float:
    """Seconds in `90s`, `20m`, `1h` or a plain number of seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)([smh]?)", text.strip())
    if match is None:
        raise ConfigError(f"{flag} {text!r} is no time; write 90s, 20m, 1h, or a number of seconds")
    return float(match[1]) * _SECONDS[match[2]]


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _listed(flag: str, text: str, what: str = "name") -> list[str]:
    """The parts between the commas, each given once."""
    names = [name.strip() for name in text.split(",")]
    if not any(names):
        raise ConfigError(
            f"{flag} {text!r} is empty; write {what}s with commas between, or drop it"
        )
    if not all(names):
        raise ConfigError(f"{flag} {text!r} has an empty {what}; write {what}s with commas between")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{flag} {text!r} names {twice!r} twice; drop one")
    return names


def _resolve(flags: ReplayFlags) -> Config:
    given: dict[str, object] = {"replay.dram_ratio": flags.dram_ratio, "replay.gaps": flags.gaps}
    if flags.duration is not None:
        given["replay.duration_s"] = parse_seconds("--duration", flags.duration)
    if flags.gap_cap is not None:
        given["replay.gap_cap_s"] = parse_seconds("--gap-cap", flags.gap_cap)
    return resolve(given, flags.config, os.environ).config


def _seeds(flags: ReplayFlags, first: int) -> list[int]:
    if flags.seed is None:
        return list(range(first, first + (flags.seeds or 1)))
    if flags.seeds is not None:
        raise ConfigError("--seed and --seeds exclude each other; give one of them")
    names = _listed("--seed", flags.seed, "number")
    if len(names) > MOST_SEEDS:
        raise ConfigError(f"--seed names {len(names):,} seeds; give {MOST_SEEDS:,} at most")
    if not all(re.fullmatch("[0-9]{1,19}", name) and int(name) <= _LARGEST_SEED for name in names):
        raise ConfigError(
            f"--seed {_cut(flags.seed)!r} must be whole numbers from 0 to 2^63 - 1, as in "
            "--seed 0,1,2"
        )
    seeds = [int(name) for name in names]
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seed {flags.seed!r} names a seed twice; drop one")
    return seeds


def _cut(text: str) -> str:
    """Enough of what was given to know it by."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mode(name: str) -> Mode:
    known = [mode.value for mode in Mode]
    if name not in known:
        raise UnknownNameError("mode", name, known)
    return Mode(name)


def _copy_path(name: str) -> CopyPath:
    known = [path.value for path in CopyPath]
    if name not in known:
        raise UnknownNameError("copy path", name, known)
    return CopyPath(name)


def _check_pointless(flags: ReplayFlags, mode: Mode, config: Config) -> None:
    """A flag that this replay would not heed is a mistake to be told of."""
    if mode is Mode.BATCH and flags.duration is not None:
        raise ConfigError("--duration has no meaning in batch mode, which runs to the end; drop it")
    if mode is Mode.OPEN and flags.programs is not None:
        raise ConfigError("--programs has no meaning in open mode: the trace says who arrives when")
    if mode is Mode.OPEN and flags.profile is not None:
        raise ConfigError("open mode needs recorded arrivals; give a trace file, or --mode batch")
    low, high = _DURATION_S
    if mode is not Mode.BATCH and not low <= config.replay.duration_s <= high:
        raise ConfigError(
            f"replay.duration_s={config.replay.duration_s:g} is out of range; give a --duration "
            "from 1s to 720h (30 days)"
        )
    if flags.gap_cap is not None and config.replay.gaps != "capped":
        raise ConfigError(f"--gap-cap has no meaning with --gaps {config.replay.gaps}; drop one")


def _shared_settings(flags: ReplayFlags, config: Config) -> dict[str, Any]:
    """The configuration as the simulator takes it: the one place where names meet."""
    engine, replay = config.engine.model_dump(), config.replay.model_dump()
    limits = {field.name for field in fields(EngineSettings)} & set(engine)
    return {
        "scheduler": SchedulerSettings(**config.scheduler.model_dump()),
        "concur": ConcurSettings(**config.admission.model_dump()),
        "engine": EngineSettings(**{name: engine[name] for name in limits}),
        **{name: value for name, value in engine.items() if name not in limits},
        **{name: value for name, value in replay.items() if name not in ("seed", "gaps")},
        "gaps": Gaps(config.replay.gaps),
        "num_workers": flags.workers,
        "copy_path": _copy_path(flags.copy_path),
    }


def _traces(
    flags: ReplayFlags, mode: Mode, programs: int, seeds: Sequence[int]
) -> dict[int, Trace]:
    """Seed to trace: a file is the same for all, a profile draws anew for each."""
    if (flags.path is None) == (flags.profile is None):
        what = "neither is" if flags.path is None else "both are"
        raise ConfigError(
            f"give a trace PATH or a --profile, {what} given; as in --profile coding-autonomous"
        )
    if flags.path is not None:
        return dict.fromkeys(seeds, load(flags.path))
    assert flags.profile is not None
    count = programs * (_DRAWN_PER_SLOT if mode is Mode.CLOSED else 1)
    return {seed: draw(flags.profile, count, seed) for seed in seeds}


def _chosen_by_profile(flags: ReplayFlags, defaults: Load) -> tuple[str, ...]:
    if flags.profile not in _LOADS:
        return ()
    return tuple(f"--{f.name}" for f in fields(defaults) if getattr(flags, f.name) is None)
