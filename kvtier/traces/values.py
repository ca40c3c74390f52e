"""Reading of single values that come out of a file: right type, in range, or None."""

import math
from datetime import UTC, datetime

# a count above this is damage, not data; it also keeps every sum inside a float
MOST_TOKENS = 1_000_000_000
# 100 years; a longer span is a damaged number
MOST_SECONDS = 3.2e9


def as_tokens(value: object) -> int | None:
    """`value` as a token count, or None when it is no integer from 0 to a billion."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MOST_TOKENS else None


def as_seconds(value: object) -> float | None:
    """`value` as a finite number of seconds (it may be negative), or None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not (abs(value) <= MOST_SECONDS):
        return None
    return float(value)


def as_stamp_s(value: object) -> float | None:
    """A time stamp in milliseconds as seconds, or None when it is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return as_seconds(value / 1000) if abs(value) <= MOST_SECONDS * 1000 else None


def as_text(value: object) -> str | None:
    """`value` as a non-empty string that can be written as UTF-8, or None."""
    if not isinstance(value, str) or not value:
        return None
    return value.encode("utf-8", "replace").decode("utf-8")


def as_instant_s(value: object) -> float | None:
    """An ISO 8601 time stamp as seconds since 1970; without a zone it counts as UTC."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


def as_record(value: object) -> dict[str, object]:
    """`value` when it is a JSON object, else an empty one, for fields that may be missing."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """`value` when it is a JSON list, else an empty one."""
    return value if isinstance(value, list) else []
