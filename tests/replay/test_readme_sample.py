"""The sample in the README is what the command above it prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.replay import DEFAULT_POLICIES
from kvtier.cli.replay_plan import list_pairs

from .replays import ROOT, Replay, environment

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SAMPLE = re.search(r"^```text\n(SIMULATED replay\n.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMAND = re.search(r"^kvtier (replay --profile .*)$", TEXT, re.MULTILINE)


def sample() -> str:
    assert SAMPLE is not None
    return SAMPLE[1]


def heads(report: str) -> list[list[str]]:
    """The words over each rule, line by line: the titles of the columns."""
    lines = report.splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("──")]
    return [lines[index - above].split() for index in rules for above in (2, 1)]


def test_the_sample_has_the_columns_of_the_command(closed: Replay) -> None:
    assert len(heads(sample())) == 4
    assert heads(sample()) == heads(closed.process.stdout)


def test_the_sample_has_the_default_policies_in_their_order() -> None:
    rows = re.findall(r"^(\S+) +(none|concur) ", sample(), re.MULTILINE)
    assert rows == 2 * list_pairs(DEFAULT_POLICIES, "none", bound=True)


def test_the_figures_of_the_verdict_are_those_of_the_table() -> None:
    verdict = " ".join(sample().split("\n\n")[-1].split())
    best = re.match(r"(\S+) has the most output: ([\d,]+) tok/s", verdict)
    assert best is not None
    name, _, admission = best[1].partition("+concur")
    assert re.search(rf"^{re.escape(name)} +\S+ +{best[2]} ", sample(), re.MULTILINE), admission


@pytest.mark.long
def test_the_sample_is_what_the_command_prints(tmp_path: Path) -> None:
    assert COMMAND is not None
    result = subprocess.run(
        [sys.executable, "-m", "kvtier", *shlex.split(COMMAND[1])],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == sample()
