"""Fixtures shared by the trace tests: the published trace files, and small transcripts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"needs the published trace files at {SHARED}")
    return SHARED


Rows = list[dict[str, object]]


class Transcript:
    """Builds the rows of a Claude Code session, one second apart unless told otherwise."""

    def __init__(self, session: str = "s1", version: str = "2.1.7") -> None:
        self.session = session
        self.version = version
        self.rows: Rows = []

    def add(self, kind: str, at_s: float, **fields: object) -> "Transcript":
        minutes, seconds = divmod(at_s, 60)
        row: dict[str, object] = {
            "type": kind,
            "uuid": f"u{len(self.rows)}",
            "sessionId": self.session,
            "version": self.version,
            "userType": "external",
            "isSidechain": False,
            "timestamp": f"2026-01-01T00:{int(minutes):02d}:{seconds:06.3f}Z",
        }
        self.rows.append(row | fields)
        return self

    def prompt(self, at_s: float, **fields: object) -> "Transcript":
        return self.add("user", at_s, message={"role": "user", "content": "go on"}, **fields)

    def result(self, at_s: float, tool_id: str, **fields: object) -> "Transcript":
        block = {"type": "tool_result", "tool_use_id": tool_id, "content": "ok"}
        return self.add("user", at_s, message={"role": "user", "content": [block]}, **fields)

    def reply(
        self,
        at_s: float,
        call: str,
        context: int,
        *,
        tool: tuple[str, str] | None = None,
        text: str = "<35 chars>",
        model: str = "m",
        **fields: object,
    ) -> "Transcript":
        content: list[dict[str, object]] = [{"type": "text", "text": text}]
        if tool is not None:
            content.append({"type": "tool_use", "id": tool[0], "name": tool[1], "input": {}})
        usage = {"input_tokens": 1, "cache_read_input_tokens": context - 1, "output_tokens": 3}
        message = {"id": call, "role": "assistant", "model": model, "content": content}
        if context:
            message["usage"] = usage
        return self.add("assistant", at_s, message=message, requestId=f"r-{call}", **fields)

    def lines(self) -> list[str]:
        return [json.dumps(row) for row in self.rows]

    def write(self, path: Path) -> Path:
        path.write_text("\n".join(self.lines()) + "\n")
        return path


@pytest.fixture
def transcript() -> Callable[..., Transcript]:
    return Transcript
