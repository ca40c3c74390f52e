"""The Python examples of the front page and of the runtime's guide run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def example(page: str) -> str:
    (code,) = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return str(code)


def output(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_front_page_example_is_short_and_moves_pages() -> None:
    code = example("README.md")
    assert len(code.splitlines()) <= 25
    counters = dict(re.findall(r"(\w+)=(\d+)", output(code)))
    assert int(counters["loaded"]) > 0
    assert int(counters["dropped"]) == 0


def test_the_guides_example_prints_what_it_says() -> None:
    code = example("docs/runtime.md")
    said = re.findall(r"# (Found\(.*\))", code)
    lines = output(code).splitlines()
    assert lines[-1:] == said
    assert lines[0].startswith("torch.Size([0, ")


def test_importing_kvtier_loads_no_torch() -> None:
    code = "import sys, kvtier, kvtier.cli; print('torch' in sys.modules)"
    assert output(code) == "False\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import kvtier

    with pytest.raises(AttributeError, match="no attribute 'TieredRuntimes'"):
        kvtier.TieredRuntimes  # noqa: B018
