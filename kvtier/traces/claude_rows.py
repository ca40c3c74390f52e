"""Rows of a Claude Code transcript: the fields a replay needs, read defensively."""

import re
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from kvtier.traces.records import Record
from kvtier.traces.values import as_instant_s, as_list, as_record, as_text, as_tokens

# a text that was removed from a published transcript reads `<1234 chars>`, a list of texts
# `<1234 chars in 7 strings>`: the number is the length of what stood there
_PLACEHOLDER = re.compile(r"<(\d{1,9}) chars(?: in \d+ strings)?>")
_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_SYNTHETIC = "<synthetic>"
_SILENT = frozenset(
    ("progress", "file-history-snapshot", "queue-operation", "pr-link", "attachment")
)


class RowKind(Enum):
    """What a row means for a replay."""

    CALL = auto()  # a piece of a model's reply
    INPUT = auto()  # tool results or a prompt
    COMPACT = auto()  # the context was replaced by a summary
    MICROCOMPACT = auto()  # old tool results were taken out of the context
    SYNTHETIC = auto()  # a reply the client made up
    API_ERROR = auto()
    SUMMARY = auto()
    SILENT = auto()  # known, and of no weight here
    UNKNOWN = auto()


@dataclass(frozen=True)
class Row:
    """One row; `at_s` is None when its time stamp is missing or unreadable."""

    kind: RowKind
    at_s: float | None
    uuid: str | None
    body: Record
    message: Record

    @property
    def call_key(self) -> tuple[str | None, str | None, str | None]:
        """Rows with one key are one model call: message id and request id, else the row itself."""
        message_id = as_text(self.message.get("id"))
        request_id = as_text(self.body.get("requestId"))
        return message_id, request_id, self.uuid if message_id is None else None

    @property
    def is_meta(self) -> bool:
        """True for an input that the client added beside a prompt or a result."""
        return self.body.get("isMeta") is True

    def context_tokens(self) -> int:
        """Prompt tokens by `usage`: uncached, cache-write and cache-read; 0 without usage."""
        usage = as_record(self.message.get("usage"))
        return sum(as_tokens(usage.get(key)) or 0 for key in _USAGE)

    def blocks(self) -> list[Record]:
        """The content blocks; a bare string counts as one text block."""
        content = self.message.get("content")
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [block for block in as_list(content) if isinstance(block, dict)]

    def results(self) -> list[str]:
        """Ids of the tool calls this row brings results of; "" for a result without an id."""
        found = [b for b in self.blocks() if b.get("type") == "tool_result"]
        return [as_text(block.get("tool_use_id")) or "" for block in found]

    def tool_uses(self) -> list[tuple[str, str]]:
        """(id, name) of the tool calls in this row; "" for what is missing."""
        uses = [b for b in self.blocks() if b.get("type") == "tool_use"]
        return [(as_text(b.get("id")) or "", as_text(b.get("name")) or "") for b in uses]

    def num_output_chars(self) -> int:
        """Characters of text, thinking and tool input in this row."""
        total = 0
        for block in self.blocks():
            kind = block.get("type")
            if kind in ("text", "thinking"):
                total += num_chars(block.get(str(kind)))
            elif kind == "tool_use":
                total += num_json_chars(block.get("input"))
        return total


def parse_row(record: Record) -> Row:
    """Read one record of a transcript; it never fails, what is not known is UNKNOWN."""
    message = as_record(record.get("message"))
    return Row(
        kind=_kind(record, message),
        at_s=as_instant_s(record.get("timestamp")),
        uuid=as_text(record.get("uuid")),
        body=record,
        message=message,
    )


def agent_rows(record: Record) -> list[Row]:
    """Rows of a sub-agent that a progress row of its parent carries; empty for other rows."""
    data = as_record(record.get("data"))
    if data.get("type") != "agent_progress":
        return []
    nested = [data.get("message"), *as_list(data.get("normalizedMessages"))]
    return [parse_row(inner) for inner in nested if isinstance(inner, dict)]


def num_chars(value: object) -> int:
    """Characters of a text; the placeholder of a removed text counts with the length it names."""
    if not isinstance(value, str):
        return 0
    match = _PLACEHOLDER.fullmatch(value)
    return int(match[1]) if match else len(value)


def num_json_chars(value: object) -> int:
    """Characters of `value` written as JSON, which is how a model writes a tool's input."""
    if isinstance(value, str):
        return num_chars(value) + 2
    if isinstance(value, dict):
        items = [len(str(key)) + 4 + num_json_chars(item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [num_json_chars(item) for item in value]
    else:
        return len(msgspec.json.encode(value))
    return 2 + sum(items) + 2 * max(0, len(items) - 1)


def _kind(record: Record, message: Record) -> RowKind:
    kind = as_text(record.get("type"))
    if kind == "assistant":
        made_up = message.get("model") == _SYNTHETIC or record.get("isApiErrorMessage") is True
        return RowKind.SYNTHETIC if made_up else RowKind.CALL
    if kind == "user":
        return RowKind.INPUT if message else RowKind.UNKNOWN
    if kind == "system":
        return _SYSTEM.get(as_text(record.get("subtype")) or "", RowKind.SILENT)
    if kind == "summary":
        return RowKind.SUMMARY
    return RowKind.SILENT if kind in _SILENT else RowKind.UNKNOWN


_SYSTEM: dict[str, RowKind] = {
    "compact_boundary": RowKind.COMPACT,
    "microcompact_boundary": RowKind.MICROCOMPACT,
    "api_error": RowKind.API_ERROR,
}
