"""What constructors of copy backends take, checked in one line."""

from __future__ import annotations

from enum import StrEnum
from operator import index
from typing import TypeVar

from kvtier.errors import ConfigError

_Choice = TypeVar("_Choice", bound=StrEnum)


def one_of(name: str, choices: type[_Choice], given: _Choice | str | None) -> _Choice | None:
    """The choice, given as such or by its value; None stays None. Raises ConfigError otherwise."""
    if given is None:
        return None
    try:
        return choices(given)
    except ValueError:
        known = ", ".join(choices)
        raise ConfigError(f"{name}={given!r}; choose from {known}, or None") from None


def at_least_one(name: str, given: int) -> int:
    """The count as int. Raises ConfigError for less than 1, for bools, for what is no integer."""
    try:
        count = 0 if isinstance(given, bool) else index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name}={given!r}; pass an integer of at least 1")
    return count
