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


_GATHER = """
import os, sys
exec(sys.argv[1])
import torch
from kvtier.errors import CopyError
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import TritonCopy, interpreted
os.environ.update(TRITON_INTERPRET=os.environ.get("LATER", os.environ.get("TRITON_INTERPRET", "0")))
packed = torch.zeros(1, 32, dtype=torch.uint8)
try:
    TritonCopy().gather(PagedPool.of([torch.full((2, 32), 5, dtype=torch.uint8)]), [1], packed)
    print(interpreted(), set(packed[0].tolist()))
except CopyError as error:
    print(interpreted(), set(packed[0].tolist()), error)
"""
_REFUSED = "False {0} the pool is on cpu, Triton copies CUDA tensors; use CpuCopy for host tensors"


@pytest.mark.parametrize(
    ("before", "variables", "said"),
    [
        *(("", {"TRITON_INTERPRET": word}, "True {5}") for word in ("1", "true", "on", "yes", "Y")),
        *(("", {"TRITON_INTERPRET": word}, _REFUSED) for word in ("0", "")),
        (
            "",
            {"LATER": "1"},
            f"{_REFUSED}, or set TRITON_INTERPRET before triton is imported",
        ),
        (
            "import triton; os.environ['TRITON_INTERPRET'] = '1'",
            {},
            "True {0} TRITON_INTERPRET changed between the imports of triton and kvtier.kernels; "
            "set it in the environment of the process",
        ),
    ],
)
def test_kernels_are_interpreted_where_triton_was_told_so_at_its_import(
    before: str, variables: dict[str, str], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GATHER, before],
        cwd=_ROOT,
        env={**_environment(), "TRITON_INTERPRET": "0", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert (done.stderr, done.stdout) == ("", f"{said}\n")


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
