"""Where the benchmarks put their results: files of JSON lines, appended to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError


def check_writable(file: Path) -> None:
    """Make the file where there is none, before any work. Raises ConfigError where it cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--json {file}: cannot be written: {reason}") from error


def append(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """A line for each record at the end of the file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
