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
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.report import write_atomically

from .replays import environment

LONG = (
    *("--profile", "coding-autonomous", "--gpu", "H200-80GB", "--programs", "60"),
    *("--policy", "lru,mori", "--duration", "200h", "--no-bound"),
)


def test_an_interrupt_ends_with_130_and_a_partial_result(
    start_replay: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start_replay(*LONG)
    wait_for(tmp_path / "out")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "PARTIAL" in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["partial"] is True
    assert [(run["policy"], run["partial"]) for run in results["runs"]] == [("lru", True)]
    assert results["runs"][0]["simulated_s"] < 200 * 3600
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["overview.png", "overview.svg", "places.png", "places.svg", "results.json"]


def wait_for(path: Path) -> None:
    """Until the folder of results exists: from then on runs are under way."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never made"
        time.sleep(0.02)


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
