"""Results come first: whatever happens to stdout or stderr, the files are written before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.output import plain

from .replays import environment

REPLAY = (
    *("replay", "--profile", "batch-react", "--mode", "closed", "--programs", "3"),
    *("--policy", "lru", "--no-bound", "--duration", "60s", "--out", "out"),
)


def shell(folder: Path, redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command under bash, its streams redirected; exit code and stderr of kvtier."""
    script = f'"$0" -m kvtier "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", script, sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def check_files(folder: Path) -> None:
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == ["overview.png", "overview.svg", "places.png", "places.svg", "results.json"]


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "it is closed")],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_stdout_that_fails_is_one_line_after_all_files(
    tmp_path: Path, redirection: str, reason: str, options: tuple[str, ...]
) -> None:
    result = shell(tmp_path, redirection, *REPLAY, *options)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"error: standard output: {reason}"
    assert "Traceback" not in result.stderr
    check_files(tmp_path)


@pytest.mark.parametrize("arguments", [REPLAY, ("config", "show"), ("--help",), ("--version",)])
def test_a_reader_that_has_gone_ends_the_command_quietly(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = shell(tmp_path, "| true; exit ${PIPESTATUS[0]}", *arguments)
    assert result.returncode in (0, 141)
    assert "rror" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_pipe_without_a_reader_gives_the_code_of_sigpipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "kvtier", *REPLAY],
        cwd=tmp_path,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert process.returncode == 141
    assert "rror" not in process.stderr
    check_files(tmp_path)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_fails_stops_nothing(tmp_path: Path, redirection: str) -> None:
    result = shell(tmp_path, redirection, *REPLAY)
    assert result.returncode == 0
    assert result.stdout.startswith("SIMULATED replay\ntrace")
    check_files(tmp_path)


def test_help_that_cannot_be_printed_is_one_line(tmp_path: Path) -> None:
    result = shell(tmp_path, ">/dev/full", "--help")
    assert result.returncode == 2
    assert result.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb", "a\\nb"), ("\x1b[31m", "\\x1b[31m"), ("\udc80é", "\\udc80é")]
)
def test_what_does_not_print_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert plain(text) == shown
