"""From recorded programs to the steps that a simulated client performs."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from kvtier.traces import GapKind, ProgramTrace, Trace


class Gaps(StrEnum):
    """Which waits between calls are replayed."""

    RAW = "raw"
    """As recorded, people's hours included."""
    CAPPED = "capped"
    """As recorded, but none longer than the cap."""
    TOOL = "tool"
    """Tool calls as recorded; a person's prompt is there at once."""


class Mode(StrEnum):
    """How programs arrive."""

    CLOSED = "closed"
    """N slots; an ended program is replaced by the next one."""
    BATCH = "batch"
    """N programs at time 0, run out; the makespan is what counts."""
    OPEN = "open"
    """Each program at its recorded time."""


@dataclass(frozen=True, slots=True)
class SimStep:
    """One call to perform, and the wait after it. Tokens include the head."""

    context_tokens: int
    output_tokens: int
    reused_tokens: int
    gap_s: float
    tool: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded program made fit for one model and one choice of gaps."""

    name: str
    steps: tuple[SimStep, ...]
    start_s: float
    group: str | None
    head_tokens: int
    num_compactions: int
    children: tuple[tuple[int, Plan], ...] = ()
    """Sub-agents, each with the index of the step after which it starts."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One run of a plan, under a name of its own: only the head is shared with other runs."""

    program: str
    plan: Plan
    parent: str | None = None


def plan_programs(trace: Trace, max_context: int, gaps: Gaps, gap_cap_s: float) -> tuple[Plan, ...]:
    """Plans of all programs without a parent, in the trace's order, children inside."""
    children: dict[str, list[ProgramTrace]] = {}
    for program in trace.programs:
        if program.parent is not None:
            children.setdefault(program.parent, []).append(program)

    def plan(program: ProgramTrace) -> Plan:
        steps, compactions = fit_steps(program, max_context, gaps, gap_cap_s)
        starts = _step_ends(program)
        inner = tuple(
            (max(bisect_right(starts, child.start_s) - 1, 0), plan(child))
            for child in children.get(program.program, ())
        )
        head = _head_tokens(program, steps)
        group = program.shared_group if head else None
        return Plan(program.program, steps, program.start_s, group, head, compactions, inner)

    return tuple(plan(program) for program in trace.programs if program.parent is None)


def _head_tokens(program: ProgramTrace, steps: tuple[SimStep, ...]) -> int:
    if program.shared_group is None:
        return 0
    return min(program.shared_tokens, *(step.context_tokens - 1 for step in steps))


def _step_ends(program: ProgramTrace) -> list[float]:
    """Recorded end of each step's call, s; where model time is unknown it counts as none."""
    ends, now_s = [], program.start_s
    for step in program.steps:
        now_s += step.reason_s or 0.0
        ends.append(now_s)
        now_s += step.gap_s
    return ends


def fit_steps(
    program: ProgramTrace, max_context: int, gaps: Gaps, gap_cap_s: float
) -> tuple[tuple[SimStep, ...], int]:
    """Steps whose prompt and output fit `max_context` tokens, and how often that took a compaction.

    Rule: a prompt that would not fit is compacted as agents do it: it restarts at the size of the
    program's first prompt (at most half of the limit), reusing the shared head alone, and grows
    from there as recorded. A recorded shrink below the compacted size ends the offset.
    """
    restart = min(program.steps[0].context_tokens, max_context // 2)
    offset = num_compactions = 0
    previous_end = 0
    steps: list[SimStep] = []
    for step in program.steps:
        output = min(max(step.output_tokens, 1), max_context // 2)
        context = step.context_tokens - offset
        reused = min(step.reused_tokens, step.context_tokens) - offset
        if context < min(restart, step.context_tokens):
            offset, context, reused = 0, step.context_tokens, step.reused_tokens
        if context + output > max_context:
            offset, context = step.context_tokens - restart, restart
            reused = 0
            num_compactions += 1
        head = program.shared_tokens if program.shared_group is not None else 0
        reused = max(min(reused, previous_end, context), min(head, context - 1) if steps else 0)
        reused = min(reused, max(previous_end, 0))
        tool = step.tools[0].name if step.tools else None
        steps.append(
            SimStep(context, output, reused, _gap(step.gap_kind, step.gap_s, gaps, gap_cap_s), tool)
        )
        previous_end = context + output
    return tuple(steps), num_compactions


def _gap(kind: GapKind, gap_s: float, gaps: Gaps, cap_s: float) -> float:
    if gaps is Gaps.CAPPED:
        return min(gap_s, cap_s)
    if gaps is Gaps.TOOL and kind is GapKind.PROMPT:
        return 0.0
    return gap_s


def instances(plans: tuple[Plan, ...], seed: int) -> Iterator[Instance]:
    """Runs of the plans without end: all of them in a shuffled order, then shuffled anew."""
    source = random.Random(f"{seed}:order")
    numbers = count()
    while True:
        order = list(plans)
        source.shuffle(order)
        for plan in order:
            yield Instance(f"{plan.name}#{next(numbers)}", plan)
