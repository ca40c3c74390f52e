"""Reader of Claude Code transcripts: one file, a project folder, or all projects."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvtier.errors import TraceError
from kvtier.traces.claude_rows import Row, RowKind, agent_rows, parse_row
from kvtier.traces.claude_thread import Thread
from kvtier.traces.model import START_DIGITS, ProgramTrace, Trace, build_trace
from kvtier.traces.records import iter_records
from kvtier.traces.reuse import claude_head
from kvtier.traces.sniff import CLAUDE_CODE, READABLE, recognise, sniff
from kvtier.traces.values import as_record, as_text

FORMAT = "claude-code"
# Files of a folder without transcripts that are looked at, to say what is there.
_LOOKED_AT = 200
COUNTED = {
    RowKind.SYNTHETIC: "synthetic_reply",
    RowKind.API_ERROR: "api_error",
    RowKind.SUMMARY: "summary_row",
    RowKind.UNKNOWN: "unknown_row",
}


def read_claude_file(path: Path) -> Trace:
    """Read one session file; sub-agents told of in it become child programs.

    Raises TraceError when it holds no model call with usage.
    """
    warnings: Counter[str] = Counter()
    sessions = [_read_session(path, warnings)]
    return build_trace(FORMAT, _programs(sessions, warnings), warnings, path.name)


def read_claude_folder(path: Path) -> Trace:
    """Read all transcripts below `path` (a project folder, or `~/.claude/projects`).

    Files of other kinds are counted (`other_file`, `empty_file`) and left out. Raises TraceError
    when no file is a transcript or none holds a model call with usage.
    """
    warnings: Counter[str] = Counter()
    sessions = [
        _read_session(file, warnings) for file in _files(path) if _is_transcript(file, warnings)
    ]
    if not sessions:
        raise TraceError(
            f"{path}: no Claude Code transcript in this folder{_found_instead(path)}; name a "
            f"folder that holds some, or one file ({READABLE})"
        )
    name = path.resolve().name
    return build_trace(FORMAT, _programs(sessions, warnings), warnings, name)


def _found_instead(path: Path) -> str:
    """The other formats in a folder, by the first of its files."""
    found: Counter[str] = Counter()
    for file in islice(_files(path), _LOOKED_AT):
        try:
            name = recognise(file)
        except TraceError:
            continue
        if name is not None:
            found[name] += 1
    kinds = ", ".join(f"{name} ({count})" for name, count in found.items())
    return f", but {kinds}" if kinds else ""


def _files(path: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise TraceError(f"{error.filename}: cannot be listed ({error.strerror}); check it")

    for folder, folders, names in os.walk(path, onerror=stop):
        folders.sort()
        for name in sorted(names):
            yield Path(folder) / name


def _is_transcript(file: Path, warnings: Counter[str]) -> bool:
    if file.is_file() and file.stat().st_size == 0:
        warnings["empty_file"] += 1
        return False
    try:
        kind = sniff(file)
    except TraceError:
        kind = None
    if kind != CLAUDE_CODE:
        warnings["other_file"] += 1
    return kind == CLAUDE_CODE


@dataclass
class _Session:
    """What one file holds: the main thread, and one thread per sub-agent by its id."""

    main: Thread
    agents: dict[str, Thread] = field(default_factory=dict)
    session_ids: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last session id: a resumed file starts with rows of the session it goes on from."""
        return self.session_ids[-1] if self.session_ids else "session"

    def agent(self, agent_id: str) -> Thread:
        if agent_id not in self.agents:
            self.agents[agent_id] = Thread(self.main.warnings)
        return self.agents[agent_id]

    def thread_of(self, row: Row) -> Thread:
        """The main thread, or the sub-agent's for a side chain."""
        if row.body.get("isSidechain") is not True:
            return self.main
        agent_id = as_text(row.body.get("agentId"))
        if agent_id is None:
            # older versions give side chains no id: the first row of the chain names it
            parent = as_text(row.body.get("parentUuid")) or ""
            agent_id = self.roots.get(parent, row.uuid or "sidechain")
            if row.uuid is not None:
                self.roots[row.uuid] = agent_id
        return self.agent(agent_id)

    def note(self, row: Row) -> None:
        session_id = as_text(row.body.get("sessionId"))
        if session_id is not None and (not self.session_ids or self.session_ids[-1] != session_id):
            if session_id not in self.session_ids:
                self.main.warnings["second_session_id"] += bool(self.session_ids)
            self.session_ids.append(session_id)
        version = as_text(row.body.get("version"))
        if version is not None and version not in self.versions:
            self.versions.append(version)


def _read_session(path: Path, warnings: Counter[str]) -> _Session:
    session = _Session(Thread(warnings))
    latest_s: float | None = None
    for record in iter_records(path, warnings):
        row = parse_row(record)
        session.note(row)
        if row.kind in COUNTED:
            warnings[COUNTED[row.kind]] += 1
        if row.at_s is not None:
            warnings["time_back"] += latest_s is not None and row.at_s < latest_s
            latest_s = row.at_s
        elif row.kind in (RowKind.CALL, RowKind.INPUT):
            warnings["bad_time"] += 1
        inner = agent_rows(record)
        if inner:
            agent_id = as_text(as_record(record.get("data")).get("agentId")) or "agent"
            _add_nested(session.agent(agent_id), inner)
        else:
            session.thread_of(row).add(row)
    return session


def _add_nested(thread: Thread, rows: list[Row]) -> None:
    """Add rows of a progress report; reports repeat earlier rows, which is no damage."""
    for row in rows:
        if not thread.has_seen(row):
            thread.add(row)


def _programs(sessions: list[_Session], warnings: Counter[str]) -> list[ProgramTrace]:
    threads = _merge(sessions, warnings)
    starts = [start for _, _, thread, _ in threads if (start := thread.start_s()) is not None]
    origin_s = min(starts, default=0.0)
    names = {name for name, parent, _, _ in threads if parent is None}
    programs = []
    for name, parent, thread, versions in threads:
        if parent is not None and parent not in names:
            warnings["parent_not_found"] += 1
        first = thread.first_context_tokens()
        group, head_tokens = claude_head(versions, first, is_subagent=parent is not None)
        start_s = thread.start_s()
        programs.append(
            ProgramTrace(
                program=name,
                steps=thread.steps(head_tokens),
                start_s=round((start_s or origin_s) - origin_s, START_DIGITS),
                parent=parent if parent in names else None,
                shared_group=group,
                shared_tokens=head_tokens,
            )
        )
    return programs


_Named = tuple[str, str | None, Thread, list[str]]


def _merge(sessions: list[_Session], warnings: Counter[str]) -> list[_Named]:
    """(name, parent, thread, versions) of all threads with calls, names made unique.

    A sub-agent may be told of twice, by progress rows of its parent and by its own file: the
    fuller of the two is taken.
    """
    named: dict[str, _Named] = {}
    agents: dict[tuple[str, str], tuple[Thread, list[str]]] = {}
    for session in sessions:
        for thread in (session.main, *session.agents.values()):
            warnings["call_without_usage"] += thread.num_without_usage
        if session.main.num_calls:
            name = session.name
            while name in named:
                warnings["repeated_session_id"] += name == session.name
                name += "+"
            named[name] = (name, None, session.main, session.versions)
        for agent_id, thread in session.agents.items():
            key = (session.name, agent_id)
            if key not in agents or thread.num_calls > agents[key][0].num_calls:
                agents[key] = (thread, session.versions)
    for (parent, agent_id), (thread, versions) in agents.items():
        if thread.num_calls:
            name = f"{parent}/{agent_id}"
            named[name] = (name, parent, thread, versions)
    return list(named.values())
