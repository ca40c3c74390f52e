"""The guides' examples run as they are written."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'kvtier[kernels-test]'")

from kvtier.kernels.naive import page_checksums

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def examples(guide: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / guide).read_text())


def test_the_example_of_the_guide_moves_the_pages_it_names() -> None:
    scope: dict[str, object] = {}
    exec(examples("kernels.md")[0], scope)
    pool, packed, ids = scope["pool"], scope["packed"], scope["ids"]
    assert packed.shape == (len(ids), pool.page_bytes)
    assert page_checksums(packed.numpy()).tolist() == pytest.approx([0] * len(ids))


def test_the_example_of_host_memory_gathers_pages_and_sums_them() -> None:
    (example,) = examples("cpu-copy.md")
    scope: dict[str, object] = {}
    exec(example, scope)
    packed, memory = scope["packed"], scope["memory"]
    expected = memory[:, scope["page_ids"]].transpose(0, 1).reshape(packed.shape)
    assert packed.equal(expected)
    assert scope["sums"].tolist() == page_checksums(packed.numpy()).tolist()


def test_the_example_of_the_interpreter_runs_in_a_process_that_has_it() -> None:
    _, example = examples("kernels.md")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_the_front_page_names_every_guide_and_every_extra() -> None:
    text = (ROOT / "README.md").read_text()
    guides = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert {guide for guide in guides if f"]({guide})" not in text} == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    listed = text[text.index("the extras are") :].partition("\n\n")[0]
    assert {extra for extra in extras if f"`{extra}`" not in listed} == set()
