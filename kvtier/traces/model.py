"""What a trace is: programs made of steps, a step being one model call and the gap after it."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from kvtier.errors import TraceError

# `start_s` keeps microseconds, so that a millisecond time stamp in a file gives back the same float
START_DIGITS = 6


class GapKind(StrEnum):
    """What ended a gap: a tool result, a person's prompt, a compaction, or nothing (the end)."""

    TOOL = "tool"
    PROMPT = "prompt"
    COMPACT = "compact"
    END = "end"


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of a step; `duration_s` is None when its result was never recorded."""

    name: str
    duration_s: float | None


class Step(msgspec.Struct, frozen=True):
    """One model call and the gap after it.

    `context_tokens` is the whole prompt (>= 1). `reused_tokens` of its leading tokens are
    identical to the previous step's prompt and output (0 for the first step). `gap_s` runs from
    the end of the call until the next input is complete (0.0 for END). `reason_s` is the measured
    model time, None when it was not recorded.
    """

    context_tokens: int
    output_tokens: int
    reused_tokens: int
    gap_s: float
    gap_kind: GapKind
    tools: tuple[ToolCall, ...] = ()
    reason_s: float | None = None


class ProgramTrace(msgspec.Struct, frozen=True):
    """One agent session: its steps in order, and when it arrives.

    `start_s` counts from the first arrival of the trace, in whole microseconds. The first
    `shared_tokens` tokens (tools and system text) are identical in all programs with the same
    `shared_group`. `parent` names the program that started this one as a sub-agent.
    """

    program: str
    steps: tuple[Step, ...]
    start_s: float
    parent: str | None = None
    shared_group: str | None = None
    shared_tokens: int = 0


class Trace(msgspec.Struct, frozen=True):
    """Programs in order of arrival, with what had to be repaired or skipped to read them.

    `warnings` counts repairs and skips by name (docs/traces.md lists the names). `sha256` is the
    digest of the programs alone: the same programs give the same digest whatever the format,
    file name or warnings. `source` is a file name without its folder.
    """

    format: str
    programs: tuple[ProgramTrace, ...]
    warnings: dict[str, int]
    sha256: str
    source: str

    @property
    def num_programs(self) -> int:
        """Number of programs, sub-agents included."""
        return len(self.programs)

    @property
    def num_steps(self) -> int:
        """Number of model calls over all programs."""
        return sum(len(program.steps) for program in self.programs)

    @property
    def num_subagents(self) -> int:
        """Number of programs that have a parent."""
        return sum(program.parent is not None for program in self.programs)


def build_trace(
    format_name: str,
    programs: Iterable[ProgramTrace],
    warnings: Mapping[str, int],
    source: str,
) -> Trace:
    """Order `programs` by arrival and name, check them, and seal them with their digest.

    Raises TraceError when there is no program or one breaks a rule of `check`.
    """
    ordered = tuple(sorted(programs, key=lambda p: (p.start_s, p.program)))
    counts = {name: count for name, count in sorted(Counter(warnings).items()) if count}
    trace = Trace(format_name, ordered, counts, digest(ordered), source)
    check(trace)
    return trace


def digest(programs: tuple[ProgramTrace, ...]) -> str:
    """Hex SHA-256 of the programs' canonical JSON: fields in declared order, shortest floats."""
    return hashlib.sha256(msgspec.json.encode(programs)).hexdigest()


def check(trace: Trace) -> None:
    """Raise TraceError naming the first program and step that break a rule of the model."""
    if not trace.programs:
        skips = ", ".join(f"{name} {count}" for name, count in trace.warnings.items())
        raise TraceError(
            f"{trace.source}: no model call with token counts in it"
            f"{f' ({skips})' if skips else ''}; give a trace with at least one"
        )
    names = {program.program for program in trace.programs}
    if len(names) != len(trace.programs):
        raise TraceError(f"{trace.source}: two programs have one name; make program names unique")
    for program in trace.programs:
        fault = _program_fault(program, names)
        if fault:
            raise TraceError(f"{trace.source}: program {program.program!r}: {fault}")


def _program_fault(program: ProgramTrace, names: set[str]) -> str | None:
    if not program.steps:
        return "has no step; drop it or give it one"
    if not (math.isfinite(program.start_s) and program.start_s >= 0):
        return f"start_s={program.start_s} must be finite and >= 0"
    if round(program.start_s, START_DIGITS) != program.start_s:
        return f"start_s={program.start_s} is finer than a microsecond; round it"
    if program.parent is not None and program.parent not in names - {program.program}:
        return f"parent {program.parent!r} is no other program of the trace"
    first = program.steps[0].context_tokens
    limit = first if program.shared_group is not None else 0
    if not 0 <= program.shared_tokens <= limit:
        return f"shared_tokens={program.shared_tokens} must be 0 to {limit} (the first context)"
    for index, step in enumerate(program.steps):
        fault = _step_fault(step, is_first=index == 0, is_last=index == len(program.steps) - 1)
        if fault:
            return f"step {index}: {fault}"
    return None


def _step_fault(step: Step, *, is_first: bool, is_last: bool) -> str | None:
    if step.context_tokens < 1:
        return f"context_tokens={step.context_tokens} must be >= 1"
    if step.output_tokens < 0:
        return f"output_tokens={step.output_tokens} must be >= 0"
    most = 0 if is_first else step.context_tokens
    if not 0 <= step.reused_tokens <= most:
        return f"reused_tokens={step.reused_tokens} must be 0 to {most}"
    times = [("gap_s", step.gap_s), ("reason_s", step.reason_s)]
    times += [(f"duration of {tool.name}", tool.duration_s) for tool in step.tools]
    for name, value_s in times:
        if value_s is not None and not (math.isfinite(value_s) and value_s >= 0):
            return f"{name}={value_s} must be finite and >= 0"
    if (step.gap_kind is GapKind.END) != is_last:
        return f"gap_kind={step.gap_kind} must be 'end' in the last step and only there"
    if is_last and step.gap_s != 0:
        return f"gap_s={step.gap_s} must be 0 after the last step"
    return None
