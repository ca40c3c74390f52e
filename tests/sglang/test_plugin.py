"""When the plug-in acts, what it checks first, and that it leaves all others alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.guard import SGLANG_VERSION, check_names, check_version
from kvtier.integration.sglang.plugin import asked_for
from kvtier.integration.sglang.settings import Control, control_of

FLAG = "--radix-cache-backend"
SWITCH = "KVTIER_SGLANG"
HEAVY = {"matplotlib", "msgspec", "numpy", "pydantic", "rich", "sglang", "torch", "triton", "typer"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch_server", FLAG, "kvtier"],
        ["launch_server", f"{FLAG}=kvtier"],
        ["launch_server", "--model-path", "m", FLAG, "kvtier", "--enable-hierarchical-cache"],
    ],
)
@pytest.mark.parametrize("environment", [{}, {SWITCH: ""}, {SWITCH: "0"}, {SWITCH: "1"}])
def test_the_flag_asks_for_the_backend(arguments: list[str], environment: dict[str, str]) -> None:
    assert asked_for(arguments, environment)


OTHERS = [
    [],
    ["launch_server"],
    ["launch_server", "kvtier"],
    ["launch_server", FLAG],
    ["launch_server", FLAG, ""],
    ["launch_server", FLAG, "flexkv"],
    ["launch_server", FLAG, "kvtier2"],
    ["launch_server", FLAG, "KVTIER"],
    ["launch_server", f"{FLAG}="],
    ["launch_server", f"{FLAG}=flexkv"],
    ["launch_server", f"{FLAG}=kvtier2"],
    ["launch_server", FLAG, "flexkv", "--served-model-name", "kvtier"],
    ["launch_server", "--radix-eviction-policy", "kvtier"],
    ["kvtier", FLAG],
]


@pytest.mark.parametrize("arguments", OTHERS)
@pytest.mark.parametrize("environment", [{}, {SWITCH: ""}, {SWITCH: "0"}, {"KVTIER": "1"}])
def test_another_command_line_does_not_ask_for_it(
    arguments: list[str], environment: dict[str, str]
) -> None:
    assert not asked_for(arguments, environment)


@pytest.mark.parametrize("arguments", OTHERS)
def test_the_switch_asks_for_it_whatever_the_command_line_is(arguments: list[str]) -> None:
    assert asked_for(arguments, {SWITCH: "1"})


@pytest.mark.parametrize("arguments", [[], [FLAG, "kvtier"]])
@pytest.mark.parametrize("value", ["2", "true", "yes", "on", " 1", "1\n", "-1", "01"])
def test_another_value_of_the_switch_is_refused_in_one_line(
    arguments: list[str], value: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        asked_for(arguments, {SWITCH: value})
    message = ended.value.code
    assert isinstance(message, str)
    assert len(message.splitlines()) == 1
    assert SWITCH in message
    assert repr(value) in message


ACTIVATE = """
import json, os, sys
from kvtier.integration.sglang.plugin import activate
before = set(sys.modules)
activate()
print(json.dumps([sorted(sys.modules), sorted(set(sys.modules) - before), dict(os.environ)]))
"""


def activate(
    *arguments: str, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Call `activate` in a process with this command line and environment."""
    inherited = {name: value for name, value in os.environ.items() if name != SWITCH}
    if path is not None:
        inherited["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", ACTIVATE, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [((), {}), ((FLAG, "flexkv"), {}), (("--port", "1"), {SWITCH: "0"})],
)
def test_a_process_that_did_not_ask_for_it_stays_as_it_was(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    done = activate(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    modules, added, variables = json.loads(done.stdout)
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert added == []
    assert variables.get(SWITCH) == environment.get(SWITCH)


def installed() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def distribution(folder: Path, number: str) -> Path:
    """A folder in which SGLang of this version is installed, as far as its metadata go."""
    info = folder / f"sglang-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {number}\n")
    return folder


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which the process ended."""
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


ASKING = pytest.mark.parametrize(
    ("arguments", "environment"),
    [((FLAG, "kvtier"), {}), ((f"{FLAG}=kvtier",), {}), ((), {SWITCH: "1"})],
)


@pytest.mark.skipif(installed() is not None, reason="SGLang is installed here")
@ASKING
def test_without_sglang_the_process_ends_with_one_line(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    line = refusal(activate(*arguments, **environment))
    assert "none is installed" in line
    assert f"pip install sglang=={SGLANG_VERSION}" in line


@pytest.mark.parametrize("number", ["0.5.22", "0.5.24", "0.5.23.post1", "0.5.23rc1", "0.6.0"])
@ASKING
def test_with_another_sglang_the_process_ends_with_one_line(
    tmp_path: Path, number: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    done = activate(*arguments, path=distribution(tmp_path, number), **environment)
    line = refusal(done)
    assert f"{number} is installed" in line
    assert SGLANG_VERSION in line


def test_a_wrong_value_of_the_switch_ends_the_process_with_one_line() -> None:
    assert SWITCH in refusal(activate(KVTIER_SGLANG="2"))


def test_the_sglang_that_it_was_built_for_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(distribution(tmp_path, SGLANG_VERSION))
    check_version()


def test_names_that_are_there_pass() -> None:
    check_names(())
    check_names(("json:loads", "pathlib:Path.home", "kvtier.integration.sglang.guard:check_names"))


@pytest.mark.parametrize(
    "missing",
    [
        "json:no_such_function",
        "pathlib:Path.no_such_method",
        "pathlib:NoSuchClass.home",
        "json.no_such_module:loads",
        "no_such_package:loads",
        "no_such_package.module:Class.method",
    ],
)
def test_a_name_that_is_gone_is_told_in_one_line(missing: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_names(("json:loads", missing, "pathlib:Path.home"))
    line = str(raised.value)
    assert len(line.splitlines()) == 1
    assert missing in line
    assert SGLANG_VERSION in line
    assert "json:loads" not in line


def test_all_names_that_are_gone_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"json:gone, pathlib:Path\.gone"):
        check_names(("json:gone", "json:loads", "pathlib:Path.gone"))


ADDRESS, TOKEN = "KVTIER_CONTROL", "KVTIER_CONTROL_TOKEN"


@pytest.mark.parametrize("environment", [{}, {ADDRESS: ""}, {TOKEN: ""}, {ADDRESS: "", TOKEN: ""}])
def test_no_control_channel_without_address_and_token(environment: dict[str, str]) -> None:
    assert control_of(environment) is None


@pytest.mark.parametrize("address", ["127.0.0.1:5000", "unix:/tmp/kvtier.sock"])
def test_address_and_token_together_give_a_control_channel(address: str) -> None:
    token = "0123456789abcdef"
    found = control_of({ADDRESS: address, TOKEN: token, "PATH": "/bin"})
    assert found == Control(Address.parse(address), token)


@pytest.mark.parametrize(
    ("address", "token"), [("0.0.0.0:1", "0123456789abcdef"), ("127.0.0.1:5000", "short")]
)
def test_what_cannot_be_an_address_or_a_token_is_refused(address: str, token: str) -> None:
    with pytest.raises(ConfigError):
        control_of({ADDRESS: address, TOKEN: token})


@pytest.mark.parametrize("empty", [{}, {ADDRESS: "", TOKEN: ""}])
@pytest.mark.parametrize(
    ("given", "missing"), [({ADDRESS: "127.0.0.1:5000"}, TOKEN), ({TOKEN: "secret"}, ADDRESS)]
)
def test_one_without_the_other_is_refused_in_one_line_that_names_both(
    empty: dict[str, str], given: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"without {missing}") as raised:
        control_of(empty | given)
    line = str(raised.value)
    assert len(line.splitlines()) == 1
    assert ADDRESS in line
    assert TOKEN in line
    assert "secret" not in line
