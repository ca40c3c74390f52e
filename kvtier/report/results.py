"""results.json: everything a replay found, in bytes that depend on its inputs alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvtier import __version__
from kvtier.report.figures import Record
from kvtier.sim import SimSettings
from kvtier.traces import Trace


def describe_trace(trace: Trace) -> dict[str, Any]:
    """What was replayed; `sha256` is the digest of its programs."""
    return {
        "source": trace.source,
        "format": trace.format,
        "sha256": trace.sha256,
        "programs": trace.num_programs,
        "steps": trace.num_steps,
        "subagents": trace.num_subagents,
        "warnings": trace.warnings,
    }


def describe_config(settings: SimSettings, seeds: Sequence[int]) -> dict[str, Any]:
    """The settings that all runs share, by section."""
    return {
        "scheduler": asdict(settings.scheduler),
        "admission": asdict(settings.concur),
        "engine": {
            "mem_fraction": settings.mem_fraction,
            "page_size": settings.page_size,
            **asdict(settings.engine),
        },
        "replay": {
            "model": settings.model.name,
            "gpu": settings.gpu.name,
            "tp": settings.tp,
            "workers": settings.num_workers,
            "programs": settings.num_programs,
            "mode": settings.mode.value,
            "duration_s": settings.duration_s,
            "dram_ratio": settings.dram_ratio,
            "gaps": settings.gaps.value,
            "gap_cap_s": settings.gap_cap_s,
            "seeds": list(seeds),
            "ramp_s": settings.ramp_s,
            "sample_s": settings.sample_s,
            "copy_path": settings.copy_path.value,
        },
        "calibration": asdict(settings.efficiency),
    }


def encode_results(
    command: Sequence[str],
    trace: Mapping[str, Any],
    config: Mapping[str, Any],
    runs: Sequence[Record],
    *,
    partial: bool,
) -> bytes:
    """The bytes of results.json: a line per entry and per run.

    A number that is not finite, such as the window where there is none, is null.
    """
    entries = {
        "kvtier": __version__,
        "simulated": True,
        "partial": partial,
        "command": list(command),
        "trace": trace,
        "config": config,
    }
    lines = [f'"{name}": {_encode(value)},' for name, value in entries.items()]
    rows = ",\n".join(_encode(run) for run in runs)
    return "\n".join(["{", *lines, '"runs": [', rows, "]", "}", ""]).encode()


def _encode(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
