"""The guide's examples run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs/transfers.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_the_engine_moves_the_pages_it_names() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")
    from kvtier.transfer.job import JobState

    scope: dict[str, object] = {}
    exec(examples()[0], scope)
    for name in ("down", "up"):
        assert scope[name].state is JobState.DONE
    engine = scope["engine"]
    engine.check_integrity()
    assert sum(job.num_pages for job in engine.poll()) == 8 + 1 + 2


def test_the_example_of_the_link_prints_what_its_comment_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = examples()[1]
    exec(example, {})
    (comment,) = re.findall(r"# (\[.*\])\n", example)
    assert capsys.readouterr().out.strip() == comment
