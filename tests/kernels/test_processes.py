"""Tests that need a process of their own: `interpreter_*.py` run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'kvtier[kernels-test]'")

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_FILES = sorted(_HERE.glob("interpreter_*.py"))
_TIMEOUT_S = 240


def test_there_are_files_to_run() -> None:
    assert len(_FILES) == 4


@pytest.mark.timeout(_TIMEOUT_S + 10)
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", str(path)],
        cwd=_ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        pytest.fail(f"{path.name} ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    _pass_skips_on(report)


def _environment() -> dict[str, str]:
    """This process's, without what its own pytest (and xdist) put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "TRITON_INTERPRET": "1"}


def _pass_skips_on(report: Path) -> None:
    """Skip, with the reason, where no test of the process ran."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    skips = [skip for case in cases for skip in case.iter("skipped")]
    assert cases
    if len(skips) == len(cases):
        pytest.skip(skips[0].get("message", "skipped without a reason"))
