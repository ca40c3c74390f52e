"""Goodput and urgent-page latency of N concurrent transfer jobs, with and without a window.

    python -m perf.transfers [--quick] [--json FILE] [--plot FILE] [--only link|memory]

Real cores, windows and clients over two movers: the link model (figures are simulated: PCIe 5 of an
H100, staged copies, a chunk of 16 MiB) and a second process that copies memory. N large jobs are
under way at all times; urgent one-page jobs arrive at random. Figures are medians over runs. The
target: goodput >= 90 % of the scene's best, and the p99 of the urgent page <= its p99 on the idle
mover + the p99 of the time of one chunk, taken from one job without a window.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.errors import KvtierError
from perf import transfer_link, transfer_memory
from perf.cpu_copy import commit
from perf.json_lines import append, check_writable
from perf.memory_copier import MemoryCopier
from perf.simulator import environment
from perf.transfer_load import WINDOWS, Outcome, percentile_us
from perf.transfer_plot import save_plot

JOBS = (1, 4, 16, 64, 256)
_QUICK_JOBS = (1, 16)
_GOODPUT_SHARE = 0.9
_MOVERS = ("link", "memory")

Run = Callable[[int, str, int], Outcome]
"""Of (number of jobs, window, seed)."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    num_jobs: Sequence[int]
    link_runs: int
    link_s: float
    memory_runs: int
    memory_s: float


FULL = Plan(JOBS, 3, 5.0, 15, 1.0)
QUICK = Plan(_QUICK_JOBS, 1, 1.0, 1, 0.3)


def main() -> None:
    """Measure, print the tables, write JSON lines and a plot where they are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few jobs, one short run each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw to FILE (.svg or .png)")
    parser.add_argument("--only", choices=_MOVERS, help="leave the other mover out")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    records: list[dict[str, Any]] = []
    console = Console(width=110)
    try:
        for path in (arguments.json, arguments.plot):
            if path is not None:
                check_writable(path)
        for scene in measure(plan, (arguments.only,) if arguments.only else _MOVERS):
            records += scene
            console.print(render(scene))
        if arguments.plot is not None:
            save_plot(records, arguments.plot)
    except KvtierError as error:
        parser.error(str(error))
    if arguments.json is not None:
        append(arguments.json, records)


def measure(plan: Plan, movers: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Per scene, a record per window and number of jobs; 0 jobs first: the idle mover."""
    if "link" in movers:
        for scene in transfer_link.SCENES:

            def link(
                num_jobs: int, window: str, seed: int, scene: transfer_link.Scene = scene
            ) -> Outcome:
                return transfer_link.run(scene, num_jobs, window, plan.link_s, seed)

            conditions = {
                "mover": "link",
                "scene": scene.name,
                "simulated": True,
                "model": transfer_link.MODEL,
                "gpu": transfer_link.GPU,
            }
            yield judge(_outcomes(link, plan.num_jobs, plan.link_runs), conditions)
    if "memory" in movers:
        with MemoryCopier(transfer_memory.HALF_BYTES) as copier:
            transfer_memory.check(copier)

            def memory(num_jobs: int, window: str, seed: int) -> Outcome:
                return transfer_memory.run(copier, num_jobs, window, plan.memory_s, seed)

            conditions = {"mover": "memory", "scene": "two processes", "simulated": False}
            yield judge(_outcomes(memory, plan.num_jobs, plan.memory_runs), conditions)


def _outcomes(
    run: Run, counts: Sequence[int], num_runs: int
) -> dict[tuple[int, str], list[Outcome]]:
    """All cases one after the other in each round, so that all of them see the same machine."""
    cases = [(0, WINDOWS[0]), *((count, window) for count in counts for window in WINDOWS)]
    outcomes: dict[tuple[int, str], list[Outcome]] = {case: [] for case in cases}
    for seed in range(num_runs):
        for case in cases:
            outcomes[case].append(run(*case, seed))
    return outcomes


def judge(
    outcomes: dict[tuple[int, str], list[Outcome]], conditions: dict[str, Any]
) -> list[dict[str, Any]]:
    """A record per case; the first is the idle mover, the third one job without a window."""
    records = [
        {**conditions, "num_jobs": num_jobs, "window": window, **_figures(runs)}
        for (num_jobs, window), runs in outcomes.items()
    ]
    idle, busy = records[0], records[1:]
    best = max(record["goodput_gb_per_s"] for record in busy)
    alone = list(outcomes.values())[2]
    for record in records:
        for percent in (50, 99):
            chunk_us = median(percentile_us(run.chunk_s, percent) for run in alone)
            record[f"chunk_p{percent}_us"] = round(chunk_us, 1)
        record["share_of_best"] = round(record["goodput_gb_per_s"] / best, 4)
        record["bound_us"] = round(idle["urgent_p99_us"] + record["chunk_p99_us"], 1)
        record["met"] = (
            record["share_of_best"] >= _GOODPUT_SHARE
            and record["urgent_p99_us"] <= record["bound_us"]
        )
    idle["met"] = None
    return records


def _figures(runs: Sequence[Outcome]) -> dict[str, Any]:
    """Medians over the runs, with the lowest and the highest; percentiles are those of a run."""
    goodput = [run.goodput_bytes_per_s / 1e9 for run in runs]
    p50 = [percentile_us(run.latencies_s, 50.0) for run in runs]
    p99 = [percentile_us(run.latencies_s, 99.0) for run in runs]
    return {
        "goodput_gb_per_s": round(median(goodput), 3),
        "goodput_min": round(min(goodput), 3),
        "goodput_max": round(max(goodput), 3),
        "urgent_p50_us": round(median(p50), 1),
        "urgent_p99_us": round(median(p99), 1),
        "urgent_p99_min_us": round(min(p99), 1),
        "urgent_p99_max_us": round(max(p99), 1),
        "num_urgent": sum(len(run.latencies_s) for run in runs),
        "num_runs": len(runs),
        "seeds": list(range(len(runs))),
        "page_bytes": runs[0].load.page_bytes,
        "job_pages": runs[0].load.job_pages,
        "chunk_bytes": runs[0].load.chunk_bytes,
        "environment": environment()
        | {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    }


def render(records: Sequence[dict[str, Any]]) -> Table:
    """The scene as a table, its bound in the title."""
    idle = records[0]
    what = "SIMULATED link" if idle["simulated"] else "memory (measured)"
    table = Table(
        title=f"{what}, {idle['scene']}, chunks of {idle['chunk_bytes'] / 2**20:.2f} MiB\n"
        f"idle p99 {idle['urgent_p99_us']:,.0f} us + p99 of a chunk {idle['chunk_p99_us']:,.0f} us "
        f"(median {idle['chunk_p50_us']:,.0f}) = {idle['bound_us']:,.0f} us",
        title_justify="left",
    )
    for name in ("jobs", "window", "GB/s", "of best", "p50 us", "p99 us", "p99 of runs", "target"):
        table.add_column(name, justify="right")
    for record in records:
        low, high = record["urgent_p99_min_us"], record["urgent_p99_max_us"]
        table.add_row(
            f"{record['num_jobs']}",
            record["window"],
            f"{record['goodput_gb_per_s']:.2f}",
            f"{record['share_of_best']:.1%}",
            f"{record['urgent_p50_us']:,.0f}",
            f"{record['urgent_p99_us']:,.0f}",
            f"{low:,.0f}-{high:,.0f}",
            "" if record["met"] is None else "met" if record["met"] else "missed",
        )
    return table


if __name__ == "__main__":
    main()
