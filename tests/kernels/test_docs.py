"""The guide's example runs as it is written."""

import re
from pathlib import Path

import pytest

from kvtier.kernels.naive import page_checksums

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_of_the_guide_moves_the_pages_it_names() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    scope: dict[str, object] = {}
    exec(blocks[0], scope)
    pool, packed, ids = scope["pool"], scope["packed"], scope["ids"]
    assert packed.shape == (len(ids), pool.page_bytes)
    assert page_checksums(packed.numpy()).tolist() == pytest.approx([0] * len(ids))
