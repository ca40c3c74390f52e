"""How fast the simulator is: an hour of 80 programs under one policy, on one core.

    python -m perf.simulator [--policy mori] [--json]

Replays the recorded step table where the checkout has it beside it (`../shared/traces`), otherwise
the built-in profile coding-autonomous. The target is 10 s. The time is the median over repeats of
`simulate` alone: loading the trace is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from kvtier import __version__
from kvtier.hardware import load_gpu
from kvtier.layout import load_model
from kvtier.sim import SimSettings, simulate
from kvtier.traces import Trace, load, synth

_STEP_TABLE = (
    Path(__file__).resolve().parents[2] / "shared/traces/agentic/claude_code_steps.jsonl.gz"
)
_NUM_PROGRAMS = 80
_DURATION_S = 3600.0
_TARGET_S = 10.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", default="mori")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    row = measure(arguments.policy, arguments.repeats)
    print(json.dumps(row) if arguments.json else render(row))


def measure(policy: str, repeats: int) -> dict[str, Any]:
    """Wall and processor seconds of `repeats` equal runs."""
    trace = _trace()
    settings = SimSettings(
        policy=policy,
        model=load_model("Qwen2.5-7B"),
        gpu=load_gpu("H200"),
        num_programs=_NUM_PROGRAMS,
        duration_s=_DURATION_S,
    )
    wall_s, cpu_s = [], []
    record: dict[str, Any] = {}
    for _ in range(repeats):
        wall, cpu = perf_counter(), process_time()
        record = simulate(trace, settings)
        wall_s.append(perf_counter() - wall)
        cpu_s.append(process_time() - cpu)
    return {
        "case": "simulator_hour",
        "policy": policy,
        "model": settings.model.name,
        "gpu": settings.gpu.name,
        "programs": _NUM_PROGRAMS,
        "simulated_s": record["simulated_s"],
        "trace": trace.source,
        "trace_sha256": trace.sha256,
        "seed": settings.seed,
        "steps": record["steps"],
        "wall_s": round(median(wall_s), 3),
        "wall_min_s": round(min(wall_s), 3),
        "wall_max_s": round(max(wall_s), 3),
        "cpu_s": round(median(cpu_s), 3),
        "repeats": repeats,
        "simulated_s_per_s": round(record["simulated_s"] / median(wall_s), 1),
        "steps_per_s": round(record["steps"] / median(wall_s), 1),
        "target_s": _TARGET_S,
        "environment": environment(),
    }


def _trace() -> Trace:
    if _STEP_TABLE.exists():
        return load(_STEP_TABLE)
    return synth("coding-autonomous", 2 * _NUM_PROGRAMS, seed=0)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "kvtier": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_model() -> str:
    """The processor as Linux names it; the machine's kind elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def render(row: dict[str, Any]) -> str:
    """The measurement in words."""
    verdict = "within" if row["wall_s"] <= row["target_s"] else "above"
    env = row["environment"]
    return "\n".join(
        (
            f"{row['programs']} programs, {row['simulated_s']:.0f} simulated s, {row['policy']}, "
            f"{row['trace']}, seed {row['seed']}",
            f"{row['wall_s']:.2f} s wall (median of {row['repeats']}; {row['wall_min_s']:.2f} to "
            f"{row['wall_max_s']:.2f}), {row['cpu_s']:.2f} s of CPU: {verdict} the target of "
            f"{row['target_s']:.0f} s",
            f"{row['simulated_s_per_s']:,.0f} simulated s per s, {row['steps_per_s']:,.0f} program "
            "steps per s",
            f"python {env['python']}, numpy {env['numpy']}, {env['cpu']}, {env['cores']} cores, "
            f"{env['system']}",
        )
    )


if __name__ == "__main__":
    main()
