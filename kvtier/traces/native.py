"""kvtier's own JSONL: a superset of Mooncake's rows that loses nothing (docs/traces.md)."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from kvtier.errors import TraceError
from kvtier.files import irregular, write_atomically
from kvtier.traces.model import (
    START_DIGITS,
    GapKind,
    ProgramTrace,
    Step,
    ToolCall,
    Trace,
    build_trace,
    check,
)
from kvtier.traces.prefix import block_ids, common_prefix_tokens
from kvtier.traces.records import Record, iter_records
from kvtier.traces.reuse import reused_tokens
from kvtier.traces.values import as_list, as_seconds, as_stamp_s, as_text, as_tokens

FORMAT = "native"
# an arrival later than ten years is wall-clock time: the earliest one then becomes 0
WALL_CLOCK_S = 3.15e8
_KINDS = {kind.value: kind for kind in GapKind if kind is not GapKind.END}


def read_native(path: Path) -> Trace:
    """Read native JSONL; rows of one `session_id` are a program, in file order.

    A row without a `session_id`, a positive `input_length` and an `output_length` is skipped and
    counted as `bad_row`. Raises TraceError when no row is left.
    """
    warnings: Counter[str] = Counter()
    sessions: dict[str, _Session] = {}
    for record in iter_records(path, warnings):
        name = as_text(record.get("session_id"))
        row = _parse_row(record, warnings) if name is not None else None
        if name is None or row is None:
            warnings["bad_row"] += 1
            continue
        if name not in sessions:
            sessions[name] = _Session(name, record, row)
        else:
            sessions[name].add(row, warnings)
    first_s = min((session.rows[0].at_s for session in sessions.values()), default=0.0)
    origin_s = 0.0 if 0 <= first_s < WALL_CLOCK_S else first_s
    programs = [s.program(origin_s, sessions, warnings) for s in sessions.values()]
    return build_trace(FORMAT, programs, warnings, path.name)


def native_target(path: str | os.PathLike[str]) -> Path:
    """The file that `write_native` writes for `path`: at the end of its links, if it is one.

    Raises TraceError when something that is no regular file is there, or no folder to hold it.
    """
    place = Path(path)
    try:
        fault = irregular(place)
        target = Path(os.path.realpath(place))
        fault = fault or ("a loop of links" if target.is_symlink() else None)
    except OSError as error:
        raise TraceError(
            f"{place}: cannot be written ({error.strerror}); name another file"
        ) from error
    if fault is not None:
        raise TraceError(f"{place}: this is {fault} and is not written to; name a file")
    if not target.parent.is_dir():
        raise TraceError(f"{place}: cannot be written, {target.parent} is no folder; make it first")
    return target


def write_native(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write `trace` so that reading it back gives equal programs and the same digest.

    The file appears whole or not at all (written beside its place, then renamed); a link stays and
    what it points to is written. The warnings of the trace are not written. Raises TraceError when
    the trace breaks a rule of the model, something that is no regular file is at `path`, or the
    folder cannot be written to.
    """
    check(trace)
    target = native_target(path)

    def write(file: IO[bytes]) -> None:
        for row in _rows(trace):
            file.write(msgspec.json.encode(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())

    try:
        write_atomically(target, write)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror}); check it") from error


def _rows(trace: Trace) -> Iterator[Record]:
    for program in trace.programs:
        at_s = program.start_s
        before: Step | None = None
        for step in program.steps:
            yield _row(program, step, before, at_s)
            at_s += (step.reason_s or 0.0) + step.gap_s
            before = step


def _row(program: ProgramTrace, step: Step, before: Step | None, at_s: float) -> Record:
    row: Record = {
        "timestamp": round(at_s * 1000, 3),
        "input_length": step.context_tokens,
        "output_length": step.output_tokens,
        "session_id": program.program,
    }
    if before is None:
        if program.parent is not None:
            row["parent_id"] = program.parent
        if program.shared_group is not None:
            row["shared_group"] = program.shared_group
            row["shared_tokens"] = program.shared_tokens
    else:
        row["delay"] = before.gap_s
        row["gap_kind"] = before.gap_kind.value
        row["reused"] = step.reused_tokens
    if step.reason_s is not None:
        row["reason"] = step.reason_s
    if step.tools:
        row["tools"] = [[tool.name, tool.duration_s] for tool in step.tools]
    return row


@dataclass
class _Row:
    """One request as written: `delay_s` and `gap_kind` tell of the wait before it."""

    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    delay_s: float | None
    gap_kind: GapKind
    tools: tuple[ToolCall, ...]
    reason_s: float | None
    reused: int | None


@dataclass
class _Session:
    name: str
    first: Record
    first_row: _Row
    rows: list[_Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [self.first_row]

    def add(self, row: _Row, warnings: Counter[str]) -> None:
        """Append a row, with its delay worked out from the time stamps when it has none."""
        before = self.rows[-1]
        if row.delay_s is None:
            row.delay_s = row.at_s - before.at_s - (before.reason_s or 0.0)
            if row.delay_s < 0:
                warnings["time_back"] += 1
                row.delay_s = 0.0
        self.rows.append(row)

    def program(
        self, origin_s: float, known: dict[str, "_Session"], warnings: Counter[str]
    ) -> ProgramTrace:
        parent = as_text(self.first.get("parent_id"))
        if parent is not None and (parent not in known or parent == self.name):
            warnings["parent_not_found"] += 1
            parent = None
        group = as_text(self.first.get("shared_group"))
        head_tokens = self._head_tokens(group, warnings)
        return ProgramTrace(
            program=self.name,
            steps=tuple(self._steps(head_tokens, warnings)),
            start_s=round(self.rows[0].at_s - origin_s, START_DIGITS),
            parent=parent,
            shared_group=group,
            shared_tokens=head_tokens,
        )

    def _head_tokens(self, group: str | None, warnings: Counter[str]) -> int:
        if group is None:
            return 0
        value = as_tokens(self.first.get("shared_tokens"))
        if value is None or value > self.rows[0].input_tokens:
            warnings["bad_shared_tokens"] += 1
            return 0
        return value

    def _steps(self, head_tokens: int, warnings: Counter[str]) -> Iterator[Step]:
        for index, row in enumerate(self.rows):
            after = self.rows[index + 1] if index + 1 < len(self.rows) else None
            yield Step(
                context_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                reused_tokens=self._reused(index, head_tokens, warnings),
                gap_s=after.delay_s or 0.0 if after else 0.0,
                gap_kind=after.gap_kind if after else GapKind.END,
                tools=row.tools,
                reason_s=row.reason_s,
            )

    def _reused(self, index: int, head_tokens: int, warnings: Counter[str]) -> int:
        if index == 0:
            return 0
        row, before = self.rows[index], self.rows[index - 1]
        if row.reused is not None:
            if row.reused <= row.input_tokens:
                return row.reused
            warnings["bad_reused"] += 1
        if row.ids and before.ids:
            return common_prefix_tokens(before.ids, row.ids, row.input_tokens)
        return reused_tokens(
            (before.input_tokens, before.output_tokens),
            row.input_tokens,
            head_tokens,
            compacted=row.gap_kind is GapKind.COMPACT,
        )


def _parse_row(record: Record, warnings: Counter[str]) -> _Row | None:
    at_s = as_stamp_s(record.get("timestamp"))
    input_tokens = as_tokens(record.get("input_length"))
    output_tokens = as_tokens(record.get("output_length"))
    if at_s is None or not input_tokens or output_tokens is None:
        return None
    return _Row(
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ids=block_ids(record.get("hash_ids")),
        delay_s=_span(record, "delay", warnings),
        gap_kind=_gap_kind(record.get("gap_kind"), warnings),
        tools=_tools(record.get("tools"), warnings),
        reason_s=_span(record, "reason", warnings),
        reused=as_tokens(record.get("reused")),
    )


def _gap_kind(value: object, warnings: Counter[str]) -> GapKind:
    if isinstance(value, str) and value in _KINDS:
        return _KINDS[value]
    if value is not None:
        warnings["gap_kind_unknown"] += 1
    return GapKind.TOOL


def _span(record: Record, key: str, warnings: Counter[str]) -> float | None:
    if record.get(key) is None:
        return None
    seconds = as_seconds(record[key])
    if seconds is None or seconds < 0:
        warnings[f"bad_{key}"] += 1
        return None
    return seconds


def _tools(value: object, warnings: Counter[str]) -> tuple[ToolCall, ...]:
    calls = []
    for item in as_list(value):
        pair = as_list(item)
        name = as_text(pair[0]) if len(pair) == 2 else None
        duration_s = as_seconds(pair[1]) if len(pair) == 2 else None
        if name is None or (duration_s is not None and duration_s < 0):
            warnings["bad_tool"] += 1
            continue
        calls.append(ToolCall(name, duration_s))
    return tuple(calls)
