"""Layers the sources of configuration and remembers where each value comes from."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from kvtier.config.model import Config
from kvtier.config.reference import ENV_PREFIX, Setting, list_settings
from kvtier.errors import ConfigError, nearest

CONFIG_VARIABLE: Final = "KVTIER_CONFIG"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The effective configuration."""

    config: Config
    origins: Mapping[str, str]
    """Key to origin: "flag", "environment NAME", "file PATH" or "default"."""

    def value(self, key: str) -> object:
        """The effective value of `key`, one of those that `list_settings` names."""
        section, name = key.split(".")
        return getattr(getattr(self.config, section), name)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as some source gives it."""

    value: object
    origin: str


def resolve(
    flags: Mapping[str, object], config_file: Path | None, environ: Mapping[str, str]
) -> Resolved:
    """Merge flags over environment over file over defaults.

    `flags` maps keys such as "scheduler.tick_s" to values; None stands for a flag that was not
    given. Without `config_file`, the variable KVTIER_CONFIG names the file, if it is set. Raises
    ConfigError for an unknown key or variable, a value out of range, and a file that cannot be
    read.
    """
    settings = {setting.key: setting for setting in list_settings()}
    named_file = config_file or _file_from(environ)
    given: dict[str, _Given] = {}
    if named_file is not None:
        given |= _from_file(named_file, settings)
    given |= _from_environment(environ, settings)
    given |= _from_flags(flags, settings)
    origins = {key: given[key].origin if key in given else "default" for key in settings}
    return Resolved(_validated(given, settings), origins)


def _file_from(environ: Mapping[str, str]) -> Path | None:
    name = environ.get(CONFIG_VARIABLE)
    try:
        return Path(name).expanduser() if name else None
    except RuntimeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}={name}: no such user; give another path") from error


def _from_flags(flags: Mapping[str, object], settings: Mapping[str, Setting]) -> dict[str, _Given]:
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        _check_known(key, settings, "the flags")
    return {key: _Given(value, "flag") for key, value in given.items()}


def _from_environment(
    environ: Mapping[str, str], settings: Mapping[str, Setting]
) -> dict[str, _Given]:
    variables = {setting.variable: key for key, setting in settings.items()}
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        _check_known(variable, (*variables, CONFIG_VARIABLE), "the environment")
        given[variables[variable]] = _Given(environ[variable], f"environment {variable}")
    return given


def _from_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, _Given]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    given = {}
    for section, table in tables.items():
        _check_known(section, {key.split(".")[0] for key in settings}, str(path))
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {path} must be a table; write [{section}]")
        for name, value in table.items():
            key = f"{section}.{name}"
            _check_known(key, settings, str(path))
            given[key] = _Given(value, f"file {path}")
    return given


def _check_known(name: str, known: Iterable[str], where: str) -> None:
    names = sorted(known)
    if name not in names:
        raise ConfigError(f"unknown setting {name!r} in {where}; nearest: {nearest(name, names)!r}")


def _validated(given: Mapping[str, _Given], settings: Mapping[str, Setting]) -> Config:
    tree: dict[str, dict[str, object]] = {}
    for key, item in given.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = item.value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, given, settings)) from error


def _explain(
    error: ValidationError, given: Mapping[str, _Given], settings: Mapping[str, Setting]
) -> str:
    """One line about the first problem; the others show once it is mended."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    if key not in given:
        reason = str(problem["msg"]).removeprefix("Value error, ")
        return f"settings of [{key}] contradict each other: {reason}"
    item, allowed = given[key], settings[key].allowed
    return f"{key}={item.value!r} from {item.origin} is not allowed; expected: {allowed}"
