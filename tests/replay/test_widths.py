"""Tables are split, names repeated, and never cut at the width there is."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.report import group_runs
from kvtier.report.table import render_report

from .replays import Replay, environment
from .test_interrupt import SHORT, read_until

TITLES = ("output", "steps", "busy", "recomputed", "switches")


def report(closed: Replay, width: int) -> str:
    groups = group_runs(closed.results["runs"])
    return render_report(["header"], groups, batch=False, width=width, styled=False)


@pytest.mark.parametrize("width", [60, 72, 80, 100, 200])
def test_every_table_fits_and_repeats_the_whole_names(closed: Replay, width: int) -> None:
    text = report(closed, width)
    assert max(map(len, text.splitlines())) <= width
    num_tables = text.count("policy ")
    for names in (r"lru +none", r"lru\+offload-wb +none", r"mori +concur", r"infinite +none"):
        assert len(re.findall(rf"^{names} ", text, re.MULTILINE)) == num_tables
    assert [title for title in TITLES if text.count(title) < 1] == []


def test_narrow_tables_hold_the_figures_of_the_wide_ones(closed: Replay) -> None:
    wide, narrow = (re.findall(r"[\d.,]+-[\d.,]+", report(closed, width)) for width in (200, 60))
    assert len(wide) > 10
    assert sorted(wide) == sorted(narrow)


def test_below_60_columns_tables_are_as_at_60(closed: Replay) -> None:
    assert report(closed, 20) == report(closed, 60)


def test_no_line_ends_in_blanks(closed: Replay) -> None:
    lines = closed.process.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("columns", [60, 80])
def test_a_pipe_heeds_columns(tmp_path: Path, columns: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", *SHORT],
        cwd=tmp_path,
        env=environment({"COLUMNS": str(columns)}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_a_terminal_of_80_columns_shows_whole_names(tmp_path: Path) -> None:
    main_end, child_end = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "replay", *SHORT],
        cwd=tmp_path,
        env=environment({"TERM": "xterm"}),
        stdout=child_end,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_end)
    seen = read_until(main_end, rb"lru: [\d,]+ tok/s\.").decode()
    assert process.wait(timeout=60) == 0
    os.close(main_end)
    lines = [line.rstrip() for line in seen.splitlines()]
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("lru     none ") for line in lines) >= 2
