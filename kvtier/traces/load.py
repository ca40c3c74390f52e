"""The one entry for traces: `load` finds out what a path holds and reads it."""

import os
from pathlib import Path

from kvtier.errors import TraceError
from kvtier.traces.claude_code import read_claude_file, read_claude_folder
from kvtier.traces.model import Trace
from kvtier.traces.mooncake import read_mooncake
from kvtier.traces.native import read_native
from kvtier.traces.sniff import CLAUDE_CODE, MOONCAKE, NATIVE, STEP_TABLE, sniff
from kvtier.traces.step_table import read_step_table

_READERS = {
    NATIVE: read_native,
    MOONCAKE: read_mooncake,
    STEP_TABLE: read_step_table,
    CLAUDE_CODE: read_claude_file,
}


def load(path: str | os.PathLike[str]) -> Trace:
    """Read the trace at `path`: a file of a known format, or a folder of Claude Code transcripts.

    The format is told by content, and gzip is unpacked when the first bytes say so. Damage is
    repaired or skipped and counted in `Trace.warnings`. Raises TraceError, one line, when there
    is nothing at `path`, or a device or FIFO, or when the file is empty, of another format, or
    holds no model call.
    """
    place = Path(path)
    try:
        is_folder = place.is_dir()
        if not place.exists():
            raise TraceError(f"{place}: no such file or folder; check the path")
    except (OSError, ValueError) as error:
        raise TraceError(f"{place}: cannot be opened ({error}); check the path") from error
    try:
        return read_claude_folder(place) if is_folder else _READERS[sniff(place)](place)
    except TraceError as error:
        raise TraceError(_with_path(str(error), place)) from error


def _with_path(message: str, place: Path) -> str:
    """Faults of the programs name the trace alone, which is the last part of its path."""
    if message.startswith(str(place)):
        return message
    return f"{place}: {message.removeprefix(f'{place.resolve().name}: ')}"
