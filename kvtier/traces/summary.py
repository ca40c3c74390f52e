"""What `trace info` shows: counts and percentiles of a trace, as plain data."""

from collections import Counter
from collections.abc import Sequence

from kvtier.traces.model import GapKind, Step, Trace

PERCENTS = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0))


def summarize(trace: Trace) -> dict[str, object]:
    """Counts, percentiles and repairs of `trace`, ready for JSON.

    `pooled_idleness` is the sum of gaps over the sum of gaps and model times, over the steps whose
    model time was recorded; it is None when none was. `gap_s` leaves the ends out.
    """
    steps = [step for program in trace.programs for step in program.steps]
    gaps_s = [step.gap_s for step in steps if step.gap_kind is not GapKind.END]
    kinds = Counter(step.gap_kind.value for step in steps)
    groups = {p.shared_group for p in trace.programs if p.shared_group is not None}
    reused = sum(step.reused_tokens for step in steps)
    return {
        "source": trace.source,
        "format": trace.format,
        "sha256": trace.sha256,
        "programs": trace.num_programs,
        "subagents": trace.num_subagents,
        "steps": trace.num_steps,
        "shared_groups": len(groups),
        "steps_per_program": percentiles([len(p.steps) for p in trace.programs]),
        "context_tokens": percentiles([step.context_tokens for step in steps]),
        "output_tokens": percentiles([step.output_tokens for step in steps]),
        "reused_share": reused / sum(step.context_tokens for step in steps),
        "gap_s": percentiles(gaps_s),
        "reason_s": percentiles([s.reason_s for s in steps if s.reason_s is not None]),
        "pooled_idleness": pooled_idleness(steps),
        "gap_kinds": {kind.value: kinds[kind.value] for kind in GapKind},
        "warnings": dict(trace.warnings),
    }


def pooled_idleness(steps: Sequence[Step]) -> float | None:
    """Share of time spent in gaps, over the steps with a recorded model time; None without any."""
    timed = [(step.gap_s, step.reason_s) for step in steps if step.reason_s is not None]
    gap_s = sum(gap for gap, _ in timed)
    total_s = gap_s + sum(reason for _, reason in timed)
    return gap_s / total_s if total_s > 0 else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p10, p50, p90 and max by nearest rank (values that occur); None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: ordered[round(share * last)] for name, share in PERCENTS}
