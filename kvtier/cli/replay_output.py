"""What `kvtier replay` prints and writes once its runs are over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.replay_plan import ReplayPlan
from kvtier.cli.replay_runs import Outcome
from kvtier.report import (
    describe_config,
    describe_trace,
    encode_results,
    group_runs,
    print_report,
    write_atomically,
    write_plots,
)
from kvtier.scheduling import policy
from kvtier.sim import Gaps, Mode


def write_outputs(
    plan: ReplayPlan, outcome: Outcome, command: Sequence[str], folder: Path, *, as_json: bool
) -> None:
    """Write results.json, print the table or the JSON, then draw the plots."""
    encoded = encode_results(
        command,
        describe_trace(plan.trace),
        describe_config(plan.first, list(plan.traces)),
        outcome.records,
        partial=outcome.interrupted,
    )
    results = folder / "results.json"
    write_atomically(results, lambda file: file.write(encoded))
    groups = group_runs(outcome.records)
    if as_json:
        sys.stdout.write(encoded.decode())
        sys.stdout.flush()
    else:
        print_report(_header(plan, outcome), groups, batch=plan.is_batch)
    plots = write_plots(folder, groups, _subject(plan), batch=plan.is_batch) if groups else ()
    names = ", ".join(path.name for path in (results, *plots))
    print(f"written to {folder}: {names}", file=sys.stderr)


def _header(plan: ReplayPlan, outcome: Outcome) -> list[str]:
    trace = plan.trace
    lines = [
        "SIMULATED replay" + (", PARTIAL: it was interrupted" if outcome.interrupted else ""),
        f"trace  {trace.source} ({trace.format}): {trace.num_programs:,} programs, "
        f"{trace.num_steps:,} steps, sha256 {trace.sha256[:8]}",
    ]
    if trace.warnings:
        repairs = ", ".join(f"{name} {count:,}" for name, count in trace.warnings.items())
        lines.append(f"       repaired or skipped: {repairs}")
    lines += [f"model  {_machine(plan)}", f"load   {_load(plan)}"]
    if plan.profile_defaults:
        chosen = " ".join(plan.profile_defaults)
        lines.append(f"       {chosen}: defaults of profile batch-react")
    if len(plan.traces) > 1:
        lines.append("       figures are means, with lowest-highest over the seeds below")
    if any(policy(run.policy).unbounded for run in plan.runs):
        lines.append("bound  infinite: HBM without end, run without admission")
    return lines


def _machine(plan: ReplayPlan) -> str:
    first = plan.first
    workers = f", {first.num_workers} workers, each" if first.num_workers > 1 else ","
    dram = int(plan.hbm_tokens * first.dram_ratio)
    return (
        f"{first.model.name} on {first.tp} x {first.gpu.name}{workers} "
        f"{plan.hbm_tokens:,} tokens of KV in HBM, {dram:,} in DRAM"
    )


def _load(plan: ReplayPlan) -> str:
    first = plan.first
    length = "until all have ended"
    if first.mode is not Mode.BATCH:
        length = f"{first.duration_s / 60:g} min"
    gaps = f"gaps {first.gaps.value}"
    if first.gaps is Gaps.CAPPED:
        gaps += f" at {first.gap_cap_s:g} s"
    return (
        f"{first.mode.value}, {first.num_programs} programs, {length}, {gaps}, "
        f"{first.copy_path.value} copies, {_seeds(plan)}"
    )


def _subject(plan: ReplayPlan) -> str:
    first = plan.first
    return (
        f"{plan.trace.source}; {first.num_programs} programs, {first.model.name} on {first.tp} x "
        f"{first.gpu.name}, DRAM {first.dram_ratio:g} x HBM, {_seeds(plan)}"
    )


def _seeds(plan: ReplayPlan) -> str:
    seeds = ", ".join(str(seed) for seed in plan.traces)
    return f"{'seeds' if len(plan.traces) > 1 else 'seed'} {seeds}"
