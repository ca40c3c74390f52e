"""What `kvtier replay` prints and writes once its runs are over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.output import is_terminal, plain, print_text, width_columns
from kvtier.cli.replay_plan import ReplayPlan
from kvtier.cli.replay_runs import Outcome
from kvtier.report import (
    describe_config,
    describe_trace,
    encode_results,
    group_runs,
    render_report,
    write_plots,
    write_results,
)
from kvtier.scheduling import policy
from kvtier.sim import Gaps, Mode


def write_outcome(
    plan: ReplayPlan, outcome: Outcome, command: Sequence[str], folder: Path
) -> list[Path]:
    """Write results.json, then the plots; returns the paths in this order."""
    encoded = encode_results(
        command,
        describe_trace(plan.trace),
        describe_config(plan.first, list(plan.traces)),
        outcome.records,
        partial=outcome.interrupted,
    )
    results = write_results(folder, encoded)
    groups = group_runs(outcome.records)
    subject = _subject(plan, outcome)
    plots = write_plots(folder, groups, subject, batch=plan.is_batch) if groups else ()
    return [results, *plots]


def print_outcome(plan: ReplayPlan, outcome: Outcome, results: Path, *, as_json: bool) -> None:
    """Print the tables, or the bytes of `results`."""
    if as_json:
        print_text(results.read_text(encoding="utf-8"))
        return
    header = [plain(line) for line in _header(plan, outcome)]
    groups = group_runs(outcome.records)
    print_text(
        render_report(
            header,
            groups,
            batch=plan.is_batch,
            width=width_columns(),
            styled=is_terminal(),
        )
    )


def _header(plan: ReplayPlan, outcome: Outcome) -> list[str]:
    trace = plan.trace
    lines = [
        "SIMULATED replay" + (f", PARTIAL: {_ran(plan, outcome)}" if outcome.interrupted else ""),
        f"trace  {trace.source} ({trace.format}): {trace.num_programs:,} programs, "
        f"{trace.num_steps:,} steps, sha256 {trace.sha256[:8]}",
    ]
    if trace.warnings:
        repairs = ", ".join(f"{name} {count:,}" for name, count in trace.warnings.items())
        lines.append(f"       repaired or skipped: {repairs}")
    lines += [f"model  {_machine(plan)}", f"load   {_load(plan, outcome)}"]
    if plan.profile_defaults:
        chosen = " ".join(plan.profile_defaults)
        lines.append(f"       {chosen}: defaults of profile batch-react")
    if len(_seeds_run(plan, outcome)) > 1:
        lines.append("       figures are means, with lowest-highest over the seeds below")
    if any(policy(run.policy).unbounded for run in plan.runs):
        lines.append("bound  infinite: HBM without end, run without admission")
    return lines


def _ran(plan: ReplayPlan, outcome: Outcome) -> str:
    """How far an interrupted replay came."""
    whole = sum(not record["partial"] for record in outcome.records)
    return f"it was interrupted with {whole} of {len(plan.runs)} runs whole"


def _machine(plan: ReplayPlan) -> str:
    first = plan.first
    workers = f", {first.num_workers} workers, each" if first.num_workers > 1 else ","
    dram = int(plan.hbm_tokens * first.dram_ratio)
    return (
        f"{first.model.name} on {first.tp} x {first.gpu.name}{workers} "
        f"{plan.hbm_tokens:,} tokens of KV in HBM, {dram:,} in DRAM"
    )


def _load(plan: ReplayPlan, outcome: Outcome) -> str:
    first = plan.first
    length = "until all have ended"
    if first.mode is not Mode.BATCH:
        length = f"{first.duration_s / 60:g} min"
    gaps = f"gaps {first.gaps.value}"
    if first.gaps is Gaps.CAPPED:
        gaps += f" at {first.gap_cap_s:g} s"
    return (
        f"{first.mode.value}, {first.num_programs} programs, {length}, {gaps}, "
        f"{first.copy_path.value} copies, {_seeds(plan, outcome)}"
    )


def _subject(plan: ReplayPlan, outcome: Outcome) -> str:
    first = plan.first
    return (
        f"{plan.trace.source}; {first.num_programs} programs, {first.model.name} on {first.tp} x "
        f"{first.gpu.name}, DRAM {first.dram_ratio:g} x HBM, {_seeds(plan, outcome)}"
    )


def _seeds(plan: ReplayPlan, outcome: Outcome) -> str:
    """The seeds that ran, and how many were asked for where those are more."""
    run = _seeds_run(plan, outcome)
    text = f"{'seed' if len(run) == 1 else 'seeds'} {', '.join(map(str, run)) or 'none'}"
    missing = len(plan.traces) - len(run)
    return f"{text} ({missing} more not begun)" if missing else text


def _seeds_run(plan: ReplayPlan, outcome: Outcome) -> list[int]:
    begun = {record["seed"] for record in outcome.records}
    return [seed for seed in plan.traces if seed in begun]
