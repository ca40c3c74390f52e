"""The guide's example runs as it is written."""

import re
from pathlib import Path

from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import Tier

GUIDE = Path(__file__).resolve().parents[2] / "docs/tree.md"


def test_the_example_of_the_guide_evicts_and_keeps_copies() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, object] = {}
    exec(example, scope)
    tree = scope["tree"]
    check_integrity(tree)
    assert scope["freed"].ids(Tier.HBM).tolist() == [2, 7, 1, 3]
    assert scope["freed"].lost == 0
    assert (tree.pages[Tier.HBM].total, tree.pages[Tier.DRAM].total) == (2, 6)
