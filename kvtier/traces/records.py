"""Streaming of JSON records out of a file that may be compressed, torn or glued."""

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import NoReturn

import msgspec

from kvtier.errors import TraceError
from kvtier.files import irregular

Record = dict[str, object]

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BOM = b"\xef\xbb\xbf"


def open_trace(path: Path) -> BufferedIOBase:
    """Open `path` for reading, unpacked when its first bytes say gzip.

    Raises TraceError when it is missing, no regular file (nothing is opened then), empty,
    unreadable or packed otherwise.
    """
    try:
        fault = irregular(path)
        if fault is not None:
            raise TraceError(f"{path}: this is {fault} and is not read; copy it to a file first")
        with path.open("rb") as file:
            magic = file.read(4)
        if magic.startswith(GZIP_MAGIC):
            return gzip.open(path, "rb")
        if not magic:
            raise TraceError(f"{path}: the file is empty; give a trace with at least one record")
        if magic == ZSTD_MAGIC:
            raise TraceError(f"{path}: zstd is not read; unpack it first with `zstd -d {path}`")
        return path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened ({error.strerror}); check it") from error


def iter_records(path: Path, warnings: Counter[str]) -> Iterator[Record]:
    """Yield every JSON object of a JSON-lines file, in file order, one line in memory at a time.

    Repairs and skips are counted in `warnings`: `glued_records` (lines with more than one
    object; each is yielded), `bad_utf8`, `bad_line`, `torn_last_line`, `torn_gzip` (the packed
    stream ends early or is damaged; what came before is kept), `not_an_object`.
    """
    failed = False
    for line in _lines(path, warnings):
        if failed:
            warnings["bad_line"] += 1
        values, complete = _parse_line(line, warnings)
        failed = not complete
        if len(values) > 1:
            warnings["glued_records"] += 1
        for value in values:
            if isinstance(value, dict):
                yield value
            else:
                warnings["not_an_object"] += 1
    if failed:
        warnings["torn_last_line"] += 1


def read_head(path: Path, num_bytes: int = 65_536) -> bytes:
    """The first bytes of the unpacked file, for telling what a file without records is."""
    with open_trace(path) as file:
        try:
            return file.read(num_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b""


def _lines(path: Path, warnings: Counter[str]) -> Iterator[bytes]:
    with open_trace(path) as file:
        try:
            for number, line in enumerate(file):
                text = line.removeprefix(BOM) if number == 0 else line
                if text.strip():
                    yield text
        except (EOFError, zlib.error, gzip.BadGzipFile):
            warnings["torn_gzip"] += 1
        except OSError as error:
            raise TraceError(f"{path}: reading stopped ({error}); check the disk") from error


def _parse_line(line: bytes, warnings: Counter[str]) -> tuple[list[object], bool]:
    """The JSON values of one line, and whether all of the line was understood."""
    try:
        return [msgspec.json.decode(line)], True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_damaged(line, warnings)


def _parse_damaged(line: bytes, warnings: Counter[str]) -> tuple[list[object], bool]:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        warnings["bad_utf8"] += 1
        text = line.decode("utf-8", "replace").strip()
    values: list[object] = []
    at = 0
    while at < len(text):
        found = _value_at(text, at)
        if found is None:
            tail = _tail_record(text, at + 1)
            return (values if tail is None else [*values, tail]), False
        value, at = found
        values.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    return values, True


def _tail_record(text: str, at: int) -> object | None:
    """The whole record that ends a line whose earlier writer was cut off.

    It must reach the end of the line: a nested object of the torn record never does.
    """
    while (at := text.find('{"', at)) >= 0:
        found = _value_at(text, at)
        if found is not None and found[1] == len(text):
            return found[0]
        at += 1
    return None


def _value_at(text: str, at: int) -> tuple[object, int] | None:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
