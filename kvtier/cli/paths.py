"""Paths as the command line takes them."""

import os
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError


def path_parser(name: str) -> Callable[[str | Path], Path]:
    """Reads the value of the flag or argument `name` as a path, its `~` expanded.

    What it returns raises ConfigError for an empty value, for `-` (streams are neither read nor
    written) and for the home of an unknown user.
    """

    def parse(value: str | Path) -> Path:
        text = os.fspath(value)
        if not text.strip():
            raise ConfigError(f"{name} is empty; give a path")
        if text == "-":
            raise ConfigError(f"{name} -: streams are neither read nor written; give a path")
        if "\0" in text:
            raise ConfigError(f"{name} {text!r} has a null character in it; give a path")
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{name} {text}: no such user; give another path") from error

    return parse
