"""Reader of the step table: one line per Claude Code session, one step per model call."""

from collections import Counter
from pathlib import Path

from kvtier.traces.model import GapKind, ProgramTrace, Step, ToolCall, Trace, build_trace
from kvtier.traces.records import Record, iter_records
from kvtier.traces.reuse import claude_head, output_tokens, reused_tokens
from kvtier.traces.values import as_list, as_record, as_seconds, as_text, as_tokens

FORMAT = "claude-code-steps"


def read_step_table(path: Path) -> Trace:
    """Read a step table.

    The context is `in` + `cw` + `cr`; the output is `out_chars` at 3.5 characters per token.
    `out_reported` is a streaming partial and is not read. The table has no wall-clock times, so
    every program starts at 0. Raises TraceError when no session has a model call.
    """
    warnings: Counter[str] = Counter()
    programs = []
    names: set[str] = set()
    for record in iter_records(path, warnings):
        name = as_text(record.get("session"))
        if name is None or name in names:
            warnings["session_without_own_name"] += 1
            continue
        program = _program(name, record, warnings)
        if program is None:
            warnings["session_without_calls"] += 1
            continue
        names.add(name)
        programs.append(program)
    return build_trace(FORMAT, programs, warnings, path.name)


def _program(name: str, record: Record, warnings: Counter[str]) -> ProgramTrace | None:
    rows = []
    for value in as_list(record.get("steps")):
        row = as_record(value)
        parts = [as_tokens(row.get(key)) for key in ("in", "cw", "cr")]
        context_tokens = sum(part for part in parts if part is not None)
        if None in parts or context_tokens == 0:
            warnings["call_without_usage"] += 1
            continue
        rows.append((row, context_tokens))
    if not rows:
        return None
    versions = [v for v in map(as_text, as_list(record.get("versions"))) if v is not None]
    group, head_tokens = claude_head(versions, rows[0][1], is_subagent=False)
    steps: list[Step] = []
    for index, (row, context_tokens) in enumerate(rows):
        reused = _reused(steps, context_tokens, head_tokens)
        is_last = index == len(rows) - 1
        steps.append(_step(row, context_tokens, reused, warnings, is_last=is_last))
    return ProgramTrace(name, tuple(steps), 0.0, None, group, head_tokens)


def _reused(steps: list[Step], context_tokens: int, head_tokens: int) -> int:
    if not steps:
        return 0
    previous = steps[-1].context_tokens, steps[-1].output_tokens
    compacted = steps[-1].gap_kind is GapKind.COMPACT
    return reused_tokens(previous, context_tokens, head_tokens, compacted=compacted)


def _step(
    row: Record, context_tokens: int, reused: int, warnings: Counter[str], *, is_last: bool
) -> Step:
    chars = as_tokens(row.get("out_chars"))
    if chars is None:
        warnings["call_without_output_length"] += 1
    gap_s = None if is_last else _span(row.get("act"), warnings)
    if gap_s is None and not is_last:
        warnings["gap_not_recorded"] += 1
    return Step(
        context_tokens=context_tokens,
        output_tokens=output_tokens(chars or 0),
        reused_tokens=reused,
        gap_s=gap_s or 0.0,
        gap_kind=GapKind.END if is_last else _gap_kind(row.get("next"), warnings),
        tools=_tools(row, warnings),
        reason_s=_span(row.get("reason"), warnings),
    )


def _gap_kind(value: object, warnings: Counter[str]) -> GapKind:
    if value in ("tool", "prompt", "compact"):
        return GapKind(str(value))
    warnings["gap_kind_unknown"] += 1
    return GapKind.TOOL


def _span(value: object, warnings: Counter[str]) -> float | None:
    seconds = as_seconds(value)
    if seconds is not None and seconds < 0:
        warnings["time_back"] += 1
        return 0.0
    return seconds


def _tools(row: Record, warnings: Counter[str]) -> tuple[ToolCall, ...]:
    calls = []
    for value in as_list(row.get("tools")):
        pair = as_list(value)
        name = as_text(pair[0]) if len(pair) == 2 else None
        if name is None:
            warnings["bad_tool"] += 1
            continue
        duration_s = _span(pair[1], warnings)
        if duration_s is None:
            warnings["tool_without_result"] += 1
        calls.append(ToolCall(name, duration_s))
    return tuple(calls)
