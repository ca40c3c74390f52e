"""One Claude Code program while its rows come in: calls, their inputs, tools and gaps."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier.traces.claude_rows import Row, RowKind
from kvtier.traces.model import GapKind, Step, ToolCall
from kvtier.traces.reuse import output_tokens, reused_tokens


@dataclass
class _Tool:
    name: str
    used_at_s: float | None
    result_at_s: float | None = None
    has_result: bool = False


@dataclass
class _Input:
    """What came in between the first row of a call and the first row of the next."""

    at_s: float | None = None
    num_rows: int = 0
    ended_by: GapKind | None = None
    compacted: bool = False
    trimmed: bool = False

    def join(self, later: "_Input") -> "_Input":
        times = [t for t in (self.at_s, later.at_s) if t is not None]
        return _Input(
            at_s=max(times, default=None),
            num_rows=self.num_rows + later.num_rows,
            ended_by=later.ended_by or self.ended_by,
            compacted=self.compacted or later.compacted,
            trimmed=self.trimmed or later.trimmed,
        )


@dataclass
class _Call:
    first_at_s: float | None
    end_at_s: float | None
    input: _Input
    context_tokens: int = 0
    num_chars: int = 0
    tools: list[_Tool] = field(default_factory=list)

    @property
    def start_s(self) -> float | None:
        """When its input was complete, and never after its first row."""
        if self.input.at_s is None or self.first_at_s is None:
            return None
        return min(self.input.at_s, self.first_at_s)


class Thread:
    """Collects the rows of one program in file order; `steps` closes it.

    A model call is all rows with one message id and request id, wherever they stand in the file:
    the file is a tree, and every branch of it was a call.
    """

    def __init__(self, warnings: Counter[str]) -> None:
        self.warnings = warnings
        self._calls: list[_Call] = []
        self._by_key: dict[object, _Call] = {}
        self._tools: dict[str, _Tool] = {}
        self._input = _Input()
        self._seen: set[str] = set()

    def has_seen(self, row: Row) -> bool:
        """Whether a row with this uuid was added."""
        return row.uuid is not None and row.uuid in self._seen

    def add(self, row: Row) -> None:
        """Take in one row; a row with a uuid that was met before is skipped and counted."""
        if self.has_seen(row):
            self.warnings["repeated_row"] += 1
            return
        if row.uuid is not None:
            self._seen.add(row.uuid)
        if row.kind is RowKind.CALL:
            self._add_call(row)
        elif row.kind is RowKind.INPUT:
            self._add_input(row)
        elif row.kind is RowKind.COMPACT:
            self._input.compacted = True
        elif row.kind is RowKind.MICROCOMPACT:
            self._input.trimmed = True

    def _add_call(self, row: Row) -> None:
        call = self._by_key.get(row.call_key)
        if call is None:
            call = _Call(row.at_s, row.at_s, self._input)
            self._input = _Input()
            self._calls.append(call)
            self._by_key[row.call_key] = call
        times = [t for t in (call.end_at_s, row.at_s) if t is not None]
        call.end_at_s = max(times, default=None)
        call.context_tokens = max(call.context_tokens, row.context_tokens())
        call.num_chars += row.num_output_chars()
        for tool_id, name in row.tool_uses():
            if not name:
                self.warnings["bad_tool"] += 1
                continue
            tool = _Tool(name, row.at_s)
            call.tools.append(tool)
            self._tools[tool_id] = tool

    def _add_input(self, row: Row) -> None:
        pending = self._input
        if row.at_s is not None and (pending.at_s is None or row.at_s >= pending.at_s):
            pending.at_s = row.at_s
        pending.num_rows += 1
        results = row.results()
        if results or not row.is_meta:
            pending.ended_by = GapKind.TOOL if results else GapKind.PROMPT
        for tool_id in results:
            tool = self._tools.get(tool_id)
            if tool is None:
                self.warnings["orphan_result"] += 1
            elif not tool.has_result:
                tool.has_result, tool.result_at_s = True, row.at_s

    @property
    def num_calls(self) -> int:
        """Calls with usage so far."""
        return sum(call.context_tokens > 0 for call in self._calls)

    @property
    def num_without_usage(self) -> int:
        """Calls without usage so far: aborted ones, or rows whose usage is damaged."""
        return len(self._calls) - self.num_calls

    def first_context_tokens(self) -> int:
        """Prompt tokens of the first call with usage; 0 when there is none."""
        return next((c.context_tokens for c in self._calls if c.context_tokens), 0)

    def start_s(self) -> float | None:
        """The instant (s since 1970) at which the first call's input was complete."""
        for call in self._usable():
            return call.start_s if call.start_s is not None else call.first_at_s
        return None

    def _usable(self) -> list[_Call]:
        """Calls with usage; what came in before one without goes on to the next."""
        usable: list[_Call] = []
        carried = _Input()
        for call in self._calls:
            joined = carried.join(call.input)
            if call.context_tokens == 0:
                carried = joined
                continue
            usable.append(
                _Call(
                    call.first_at_s,
                    call.end_at_s,
                    joined,
                    call.context_tokens,
                    call.num_chars,
                    call.tools,
                )
            )
            carried = _Input()
        return usable

    def steps(self, head_tokens: int) -> tuple[Step, ...]:
        """The program's steps; counts what had to be left out or set to zero."""
        calls = self._usable()
        steps: list[Step] = []
        for index, call in enumerate(calls):
            after = calls[index + 1] if index + 1 < len(calls) else None
            before = (steps[-1].context_tokens, steps[-1].output_tokens) if steps else None
            changed = call.input.compacted or call.input.trimmed
            steps.append(
                Step(
                    context_tokens=call.context_tokens,
                    output_tokens=output_tokens(call.num_chars),
                    reused_tokens=reused_tokens(
                        before, call.context_tokens, head_tokens, compacted=changed
                    )
                    if before
                    else 0,
                    gap_s=self._gap_s(call, after) if after else 0.0,
                    gap_kind=_gap_kind(call, after),
                    tools=tuple(self._tool_call(tool) for tool in call.tools),
                    reason_s=self._span_s(call.start_s, call.end_at_s),
                )
            )
        return tuple(steps)

    def _gap_s(self, call: _Call, after: _Call) -> float:
        if after.input.num_rows == 0:
            self.warnings["input_not_found"] += 1
            return 0.0
        gap_s = self._span_s(call.end_at_s, after.start_s)
        if gap_s is None:
            self.warnings["gap_not_recorded"] += 1
            return 0.0
        return gap_s

    def _tool_call(self, tool: _Tool) -> ToolCall:
        if not tool.has_result:
            self.warnings["tool_without_result"] += 1
            return ToolCall(tool.name, None)
        return ToolCall(tool.name, self._span_s(tool.used_at_s, tool.result_at_s))

    def _span_s(self, begin_s: float | None, end_s: float | None) -> float | None:
        if begin_s is None or end_s is None:
            return None
        if end_s < begin_s:
            self.warnings["negative_span"] += 1
            return 0.0
        # time stamps are whole milliseconds; the difference of two floats is not
        return round(end_s - begin_s, 6)


def _gap_kind(call: _Call, after: _Call | None) -> GapKind:
    if after is None:
        return GapKind.END
    if after.input.compacted:
        return GapKind.COMPACT
    if after.input.ended_by is not None:
        return after.input.ended_by
    return GapKind.TOOL if call.tools else GapKind.PROMPT
