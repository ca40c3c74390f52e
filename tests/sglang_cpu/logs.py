"""Logs of running servers, for the report of a test that fails meanwhile. Needs no SGLang."""

from __future__ import annotations

from pathlib import Path

LINES = 60
WIDTH = 400
running: list[ServerLog] = []
"""The logs of the servers that run now, started by this process."""


class ServerLog:
    """A server's output in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self, lines: int = LINES) -> str:
        """The path and the last lines, each cut to WIDTH characters."""
        text = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(
            [f"{self.path}, last {lines} lines:", *(line[:WIDTH] for line in text[-lines:])]
        )
