"""Ctrl-C: what there is gets written, marked partial; no file is ever half there."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import replay_output
from kvtier.cli.app import run
from kvtier.files import write_atomically

from .replays import ROOT, environment

SHORT = (
    *("--profile", "batch-react", "--mode", "closed", "--programs", "3"),
    *("--policy", "lru", "--no-bound", "--duration", "60s"),
)
LONG = (
    *("--profile", "coding-autonomous", "--gpu", "H200-80GB", "--programs", "60"),
    *("--policy", "lru,mori", "--duration", "200h", "--no-bound"),
)


def test_an_interrupt_ends_with_130_and_a_partial_result(tmp_path: Path) -> None:
    main_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "replay", *LONG, "--seeds", "3", "--out", "out"],
        cwd=tmp_path,
        env=environment({"COLUMNS": "120", "TERM": "xterm"}),
        stdout=subprocess.PIPE,
        stderr=child_end,
        text=True,
    )
    os.close(child_end)
    read_until(main_end, rb"simulated s per s.*ETA")
    assert not (tmp_path / "out").exists()
    process.send_signal(signal.SIGINT)
    seen = read_until(main_end, rb"places.svg\r\n")
    out, _ = process.communicate(timeout=60)
    os.close(main_end)
    assert process.returncode == 130
    assert b"Traceback" not in seen
    assert b"interrupted; the results are partial" in seen
    assert "PARTIAL: it was interrupted with 0 of 6 runs whole" in out
    assert "seed 0 (2 more not begun)" in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["partial"] is True
    assert [(run["policy"], run["partial"]) for run in results["runs"]] == [("lru", True)]
    assert results["runs"][0]["simulated_s"] < 200 * 3600
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["overview.png", "overview.svg", "places.png", "places.svg", "results.json"]


def test_an_interrupt_while_plots_are_drawn_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = replay_output.write_plots

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return draw(*arguments, **options)

    monkeypatch.setattr(replay_output, "write_plots", interrupted)
    monkeypatch.chdir(tmp_path)
    assert run(["replay", *SHORT, "--out", "out"]) == 130
    out, err = capsys.readouterr()
    assert "interrupted; all runs had ended, and the results are whole" in err
    assert "PARTIAL" not in out
    assert len(list((tmp_path / "out").iterdir())) == 5
    assert json.loads((tmp_path / "out" / "results.json").read_text())["partial"] is False


def test_an_interrupt_during_start_up_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import pathlib, time\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "replay"],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline, "the start-up never came to its imports"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


def test_a_terminal_sees_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    main_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "replay", *LONG],
        cwd=tmp_path,
        env=environment({"COLUMNS": "120", "TERM": "xterm"}),
        stdout=subprocess.DEVNULL,
        stderr=child_end,
    )
    os.close(child_end)
    seen = read_until(main_end, rb"simulated s per s.*ETA")
    process.send_signal(signal.SIGINT)
    read_until(main_end, rb"places.svg\r\n")
    assert process.wait(timeout=60) == 130
    os.close(main_end)
    assert b"run 1/2: lru, admission none, seed 0" in seen


def read_until(descriptor: int, pattern: bytes) -> bytes:
    """What comes out of a terminal up to a match, control sequences left out."""
    seen = b""
    deadline = time.monotonic() + 60
    while not re.search(pattern, seen):
        assert time.monotonic() < deadline, seen[-500:]
        if select.select([descriptor], [], [], 0.1)[0]:
            seen += re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", os.read(descriptor, 65536))
    return seen


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")])
def test_a_write_that_does_not_end_leaves_the_old_file_and_no_other(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def write(file: object) -> None:
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]
