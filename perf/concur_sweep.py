"""How CONCUR's free parameters move the makespan of a batch: the sweep behind the defaults.

`python -m perf.concur_sweep [--seeds 3] [--agents 256] [--json FILE]`. Simulated figures:
batch-react agents on Qwen3-32B, 2 x H100 (CONCUR section 5's batch setting), one parameter varied
at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

from kvtier.hardware import load_gpu
from kvtier.layout import load_model
from kvtier.scheduling import ConcurSettings
from kvtier.sim import Mode, SimSettings, simulate
from kvtier.traces import synth

AXES: dict[str, tuple[float, ...]] = {
    "initial_window": (4, 8, 16, 32, 64, 128),
    "min_window": (1, 4, 8, 16),
    "interval_s": (0.5, 1, 2, 5),
    "hit_window_s": (1, 2, 5, 10, 30),
    "alpha": (1, 2, 4),
    "beta": (0.25, 0.5, 0.75),
    "u_low": (0.1, 0.2, 0.3, 0.5),
    "u_high": (0.4, 0.5, 0.6, 0.8),
    "h_thresh": (0.1, 0.2, 0.4),
}


def arms() -> Iterator[tuple[str, str, ConcurSettings]]:
    """(label, admission, settings): the references first, then one change at a time."""
    default = ConcurSettings()
    for admission in ("none", "fixed:16", "fixed:32", "fixed:64", "fixed:128", "concur", "concur+"):
        yield admission, admission, default
    for name, values in AXES.items():
        for value in values:
            if value != getattr(default, name):
                changed = {name: value}
                if name == "u_low" and value > default.u_high:
                    changed["u_high"] = value
                yield f"{name}={value:g}", "concur", replace(default, **changed)


def run(num_agents: int, num_seeds: int) -> list[dict[str, object]]:
    """One row per arm: makespan over seeds, s, and the hit rate."""
    base = SimSettings(
        policy="lru",
        model=load_model("Qwen3-32B"),
        gpu=load_gpu("H100"),
        tp=2,
        num_programs=num_agents,
        mode=Mode.BATCH,
    )
    rows: list[dict[str, object]] = []
    for label, admission, concur in arms():
        records = [
            simulate(
                synth("batch-react", num_agents, seed),
                replace(base, admission=admission, concur=concur, seed=seed),
            )
            for seed in range(num_seeds)
        ]
        spans = [record["makespan_s"] for record in records]
        rows.append(
            {
                "arm": label,
                "makespan_s": round(mean(spans), 1),
                "min_s": round(min(spans), 1),
                "max_s": round(max(spans), 1),
                "hit_rate": round(mean(record["hit_rate_hbm"] for record in records), 3),
                "simulated": True,
            }
        )
        print("{arm:20s} {makespan_s:8} s  [{min_s}, {max_s}]  hits {hit_rate}".format(**rows[-1]))
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perf.concur_sweep", description=__doc__)
    parser.add_argument("--agents", type=int, default=256, help="programs submitted at time 0")
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm")
    parser.add_argument("--json", type=Path, help="write the rows here, one JSON object a line")
    options = parser.parse_args()
    rows = run(options.agents, options.seeds)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
