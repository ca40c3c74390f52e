"""How a command ends when something other than an argument goes wrong."""

import errno

import pytest

import kvtier.config
from kvtier.cli.app import run
from kvtier.errors import CapacityError


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of a command in whose middle `error` is raised."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(kvtier.config, "resolve", fail)
    return run(["config", "show"])


def test_an_interrupt_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_with(KeyboardInterrupt(), monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_several_lines_is_printed_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_with(CapacityError("too\n  large"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: too large\n"


def test_a_file_that_the_system_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "out/results.json")
    assert end_with(error, monkeypatch) == 2
    assert capsys.readouterr().err == "error: out/results.json: Permission denied\n"


@pytest.mark.parametrize("error", [ValueError("a fault of ours"), OSError("no file")])
def test_a_fault_of_the_program_is_seen_whole(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error), match=str(error)):
        end_with(error, monkeypatch)
