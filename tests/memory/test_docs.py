"""The guide's example runs as it is written, and its messages are those of the code."""

import re
from pathlib import Path

import pytest

from kvtier.errors import PoolError

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/memory.md").read_text(encoding="utf-8")


def test_the_example_of_the_guide_gathers_three_pages_and_gives_them_back() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    scope: dict[str, object] = {}
    exec(example, scope)
    device, host = scope["device"], scope["host"]
    assert device.pages.num_free == 64
    assert host.pages.num_taken == 3
    with pytest.raises(PoolError, match="closed"):
        _ = host.packed


def test_every_file_of_the_package_is_in_the_guide() -> None:
    files = {path.name for path in (ROOT / "kvtier/memory").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"^\| `(\w+\.py)`", GUIDE, re.MULTILINE))
