"""Where a setting comes from, and what stops the start."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kvtier.config import Config, list_settings, reference_markdown, resolve
from kvtier.errors import ConfigError
from kvtier.scheduling import ConcurSettings, SchedulerSettings
from kvtier.sim.request import EngineSettings
from kvtier.sim.settings import SimSettings

ROOT = Path(__file__).resolve().parents[2]
KEY = "scheduler.tick_s"
VARIABLE = "KVTIER_SCHEDULER__TICK_S"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.toml"
    path.write_text("[scheduler]\ntick_s = 3.0\n")
    return path


def fault(
    toml_text: str | None = None,
    *,
    folder: Path | None = None,
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
) -> str:
    """The message with which `resolve` refuses these sources."""
    path = None
    if toml_text is not None and folder is not None:
        path = folder / "bad.toml"
        path.write_text(toml_text)
    with pytest.raises(ConfigError) as caught:
        resolve(flags or {}, path, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flag_beats_the_environment_and_the_environment_beats_the_file(toml: Path) -> None:
    environ = {VARIABLE: "4.0"}
    by_flag = resolve({KEY: 6.0}, toml, environ)
    by_variable = resolve({}, toml, environ)
    by_file = resolve({}, toml, {})
    by_default = resolve({}, None, {})
    found = [(r.value(KEY), r.origins[KEY]) for r in (by_flag, by_variable, by_file, by_default)]
    assert found == [
        (6.0, "flag"),
        (4.0, f"environment {VARIABLE}"),
        (3.0, f"file {toml}"),
        (5.0, "default"),
    ]


def test_a_lower_source_still_gives_the_keys_that_higher_ones_leave_out(toml: Path) -> None:
    resolved = resolve({"scheduler.window_k": 7}, toml, {"KVTIER_ENGINE__PAGE_SIZE": "16"})
    assert resolved.config.scheduler.window_k == 7
    assert resolved.config.scheduler.tick_s == 3.0
    assert resolved.config.engine.page_size == 16


def test_a_flag_that_was_not_given_changes_nothing(toml: Path) -> None:
    resolved = resolve({KEY: None}, toml, {})
    assert (resolved.value(KEY), resolved.origins[KEY]) == (3.0, f"file {toml}")


def test_the_environment_names_the_file_unless_a_flag_does(toml: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[scheduler]\ntick_s = 9.0\n")
    assert resolve({}, None, {"KVTIER_CONFIG": str(toml)}).value(KEY) == 3.0
    assert resolve({}, other, {"KVTIER_CONFIG": str(toml)}).value(KEY) == 9.0


def test_variables_of_other_programs_are_left_alone() -> None:
    assert resolve({}, None, {"HOME": "/", "TICK_S": "1"}).config == Config()


def test_an_unknown_key_in_the_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    message = fault("[scheduler]\ntik_s = 1.0\n", folder=tmp_path)
    assert "'scheduler.tik_s'" in message
    assert "'scheduler.tick_s'" in message
    assert "bad.toml" in message


def test_an_unknown_section_is_named_with_the_nearest(tmp_path: Path) -> None:
    message = fault("[schedular]\ntick_s = 1.0\n", folder=tmp_path)
    assert "'schedular'" in message
    assert "'scheduler'" in message


def test_an_unknown_variable_is_named_with_the_nearest() -> None:
    message = fault(environ={"KVTIER_SCHEDULER__TIK_S": "1"})
    assert "'KVTIER_SCHEDULER__TIK_S' in the environment" in message
    assert VARIABLE in message


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    assert "'replay.seed'" in fault(flags={"replay.sed": 1})


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    assert "write [scheduler]" in fault("scheduler = 5\n", folder=tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("scheduler.tick_s", "0", "number > 0"),
        ("scheduler.tick_s", "soon", "number > 0"),
        ("scheduler.tick_s", "inf", "number > 0"),
        ("scheduler.tick_s", "nan", "number > 0"),
        ("engine.page_size", "16.5", "whole number >= 1"),
        ("engine.mem_fraction", "1.01", "number > 0 and <= 1"),
        ("admission.beta", "1", "number > 0 and < 1"),
        ("replay.gaps", "cut", "one of capped, tool, raw"),
    ],
)
def test_a_bad_value_is_named_with_its_key_its_origin_and_the_range(
    key: str, value: str, allowed: str
) -> None:
    variable = "KVTIER_" + key.upper().replace(".", "__")
    message = fault(environ={variable: value})
    assert message == (
        f"{key}={value!r} from environment {variable} is not allowed; expected: {allowed}"
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"admission.u_low": 0.9}, "u_low=0.9 must not exceed u_high=0.5"),
        ({"admission.initial_window": 2.0, "admission.min_window": 3.0}, "min_window=3.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: dict[str, object], reason: str
) -> None:
    message = fault(flags=flags)
    assert "[admission]" in message
    assert reason in message


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.toml"):
        resolve({}, tmp_path / "none.toml", {})


@pytest.mark.parametrize("content", [b"tick_s = ", b"\xff\xfe\x00"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resolve({}, path, {})


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().scheduler.tick_s = 1.0  # type: ignore[misc]


def test_every_default_is_allowed_and_has_a_meaning_and_a_source() -> None:
    settings = list_settings()
    assert resolve({s.key: s.default for s in settings}, None, {}).config == Config()
    assert [s.key for s in settings if not (s.description and s.source and s.allowed)] == []


@pytest.mark.parametrize(
    ("section", "plain"),
    [
        (Config().scheduler, SchedulerSettings),
        (Config().admission, ConcurSettings),
        (Config().engine, EngineSettings),
        (Config().engine, SimSettings),
        (Config().replay, SimSettings),
    ],
)
def test_the_core_and_the_configuration_agree_on_every_default_they_share(
    section: BaseModel, plain: type[Any]
) -> None:
    shared = {f.name: f.default for f in fields(plain) if f.name in type(section).model_fields}
    assert shared
    assert shared == {name: getattr(section, name) for name in shared}


@pytest.mark.parametrize(
    ("section", "plain"),
    [(Config().scheduler, SchedulerSettings), (Config().admission, ConcurSettings)],
)
def test_every_setting_of_scheduling_reaches_the_scheduler(
    section: BaseModel, plain: type[Any]
) -> None:
    assert set(type(section).model_fields) <= {f.name for f in fields(plain)}


def test_the_documented_table_is_current() -> None:
    documented = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert documented == reference_markdown(), "run `make docs`"


@given(tick_s=st.floats(min_value=1e-6, max_value=1e9, allow_nan=False))
def test_a_number_in_the_environment_arrives_as_it_was_written(tick_s: float) -> None:
    assert resolve({}, None, {VARIABLE: repr(tick_s)}).value(KEY) == tick_s


@pytest.mark.parametrize("line", ["page_size = true", "mem_fraction = false"])
def test_a_truth_value_is_no_number(tmp_path: Path, line: str) -> None:
    message = fault(f"[engine]\n{line}\n", folder=tmp_path)
    assert message.startswith(f"engine.{line.split()[0]}=")
    assert "is not allowed; expected:" in message


def test_the_home_folder_is_meant_in_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "k.toml").write_text("[scheduler]\ntick_s = 3.0\n")
    assert resolve({}, None, {"KVTIER_CONFIG": "~/k.toml"}).value(KEY) == 3.0
    with pytest.raises(ConfigError, match="no such user"):
        resolve({}, None, {"KVTIER_CONFIG": "~nobody-here/k.toml"})
