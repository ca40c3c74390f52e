"""Which format a trace file has, told by its content and never by its name."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from kvtier.errors import TraceError
from kvtier.traces.records import Record, iter_records, read_head
from kvtier.traces.values import as_text

NATIVE = "native"
MOONCAKE = "mooncake"
STEP_TABLE = "step table"
CLAUDE_CODE = "Claude Code transcript"

READABLE = (
    "kvtier native JSONL, Mooncake JSONL, Claude Code transcripts (file or folder) "
    "and the Claude Code step table"
)

SNIFF_RECORDS = 200
CLAUDE_TYPES = frozenset(("system", "progress", "queue-operation", "pr-link", "attachment"))


def sniff(path: Path) -> str:
    """The format of `path`: NATIVE, MOONCAKE, STEP_TABLE or CLAUDE_CODE.

    The first record that carries a format's own fields decides. Raises TraceError that says what
    the file looks like when it is none of these.
    """
    records = list(islice(iter_records(path, Counter()), SNIFF_RECORDS))
    for name, holds in _READABLE_SIGNS:
        if any(holds(record) for record in records):
            return name
    raise TraceError(f"{path}: {_look(path, records)}; kvtier reads {READABLE}")


def recognise(path: Path) -> str | None:
    """What a file of a known format that is not read looks like, such as "a Codex rollout".

    Raises TraceError when the file cannot be read.
    """
    records = list(islice(iter_records(path, Counter()), SNIFF_RECORDS))
    return _other_format(records, read_head(path))


def _other_format(records: list[Record], head: bytes) -> str | None:
    for name, holds in _OTHER_SIGNS:
        if any(holds(record) for record in records):
            return name
    return next((name for name, pattern in _DOCUMENT_SIGNS if pattern.search(head)), None)


def _look(path: Path, records: list[Record]) -> str:
    head = read_head(path)
    name = _other_format(records, head)
    if name is not None:
        return f"this looks like {name}, which is not read: convert it to native JSONL"
    if not head.strip():
        return "there is nothing but white space in it; give a trace with at least one record"
    if head.lstrip()[:1] in (b"{", b"["):
        return "this is JSON of a kind that is not known; convert it to native JSONL"
    return "this is no trace (no JSON record was found); give a file of JSON lines"


def _has(*keys: str) -> Callable[[Record], bool]:
    return lambda record: all(key in record for key in keys)


def _is_claude(record: Record) -> bool:
    kind = as_text(record.get("type"))
    if kind == "summary":
        return "leafUuid" in record
    if kind == "file-history-snapshot":
        return "snapshot" in record
    if kind in ("user", "assistant"):
        message = record.get("message")
        is_chat = isinstance(message, dict) and "role" in message and "parts" not in message
        return is_chat and "sessionId" in record
    return kind in CLAUDE_TYPES and "sessionId" in record and "userType" in record


def _type_is(*kinds: str) -> Callable[[Record], bool]:
    return lambda record: record.get("type") in kinds


def _is_qwen(record: Record) -> bool:
    message = record.get("message")
    parts = isinstance(message, dict) and "parts" in message
    return parts or ("systemPayload" in record and "sessionId" in record)


_READABLE_SIGNS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    (NATIVE, _has("timestamp", "input_length", "output_length", "session_id")),
    (MOONCAKE, _has("timestamp", "input_length", "output_length")),
    (STEP_TABLE, lambda r: "session" in r and isinstance(r.get("steps"), list)),
    (CLAUDE_CODE, _is_claude),
)

_OTHER_SIGNS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("a WEKA kv-cache-tester trace", _has("requests", "block_size")),
    ("LMCache agent rows", _has("session_id", "input_chars", "hash_runs")),
    ("TraceLab rounds", _has("round_index", "input_tokens_total")),
    ("a Bailian trace", _has("chat_id", "parent_chat_id", "hash_ids")),
    ("a Codex rollout", lambda r: "payload" in r and _has("timestamp", "type")(r)),
    ("a Codex prompt history", _has("session_id", "ts", "text")),
    (
        "a Claude Code prompt history (model calls are in ~/.claude/projects)",
        _has("display", "project"),
    ),
    ("an OpenTelemetry dump", _has("resourceSpans")),
    ("OpenHands events", _has("kind", "source", "timestamp")),
    ("an Aider analytics log", _has("event", "properties", "time")),
    ("a Qwen Code session", _is_qwen),
    ("a Gemini CLI session", lambda r: "projectHash" in r or r.get("type") == "gemini"),
    ("a Muse Code session", _has("schema_version", "record_type", "stream")),
    ("a Copilot CLI session", lambda r: str(r.get("type")).startswith("session.")),
    ("a Kimi session", _has("type", "protocol_version")),
    ("an Antigravity session", _has("step_index", "source")),
    ("a Droid session", lambda r: r.get("type") in ("session_start", "completion")),
    ("a Droid stream", lambda r: "model" in r and r.get("type") == "system"),
    ("a pi session", _type_is("session", "model_change", "thinking_level_change")),
    ("a Grok chat", lambda r: r.get("type") == "system" and "content" in r),
    ("a Cursor chat", lambda r: "role" in r and isinstance(r.get("message"), dict)),
    ("an early Codex session", lambda r: "role" in r and ("created_at" in r or "timestamp" in r)),
)

_DOCUMENT_SIGNS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("a WEKA kv-cache-tester trace", re.compile(rb'"hash_id_scope"\s*:')),
    ("a SWE-agent trajectory", re.compile(rb'"trajectory"\s*:')),
    ("an OpenTelemetry dump", re.compile(rb'"(spans|resourceSpans|trace_id)"\s*:')),
    ("a Gemini CLI file", re.compile(rb'"(projectHash|lastUpdated|messageId)"\s*:')),
    ("an OpenHands completion log", re.compile(rb'"messages"\s*:\s*\[\s*\{\s*"content"')),
    ("an Azure LLM trace", re.compile(rb"^\xef?\xbb?\xbf?TIMESTAMP,ContextTokens")),
    ("a list of chat messages (mini-swe-agent)", re.compile(rb'^\s*\[\s*\{\s*"role"\s*:')),
)
