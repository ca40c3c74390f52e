"""The benchmark of the tree: its load, and what it says of targets."""

from __future__ import annotations

from array import array

import pytest

from kvtier.tree.node import Tier
from perf.growing import Figures, Load, Nothing, measure
from perf.tree import KvtierTree, compare, met


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_load_grows_and_empties_the_tree(page_size: int) -> None:
    subject = KvtierTree(page_size)
    figures = measure(subject, Load(page_size, num_programs=2))
    assert 2 * 15_000 < figures.num_tokens < 2 * 25_000
    assert all(figures.us[call] > 0 for call in ("match", "insert", "evict"))
    assert subject.evict(1) == 0


def test_a_step_finds_all_that_the_one_before_it_computed() -> None:
    subject = KvtierTree(4)
    for step, size in enumerate((9, 14, 22)):
        tokens = array("q", range(size))
        matched = subject.match(step, 0, tokens)
        assert matched == (0, 8, 12)[step]
        subject.prepare(tokens, matched, first_page=10 * step)
        subject.insert()
    assert subject.evict(100) == 20
    assert subject._tree.pages[Tier.HBM].total == 0


def figures(step_us: float, evict_us: float, grown: int) -> list[Figures]:
    us = {"match": step_us / 2, "insert": step_us / 2, "labels": 0.0, "evict": evict_us}
    return [Figures(us, grown, 100)]


@pytest.mark.parametrize(
    ("step_us", "evict_us", "grown", "expected"),
    [
        (50, 60, 700, "met"),
        (51, 60, 700, "missed: step"),
        (50, 61, 700, "missed: evict"),
        (50, 60, 900, "missed: memory"),
    ],
)
def test_targets_are_ratios_to_the_peer_of_the_same_run(
    step_us: float, evict_us: float, grown: int, expected: str
) -> None:
    runs = {
        "kvtier": figures(step_us, evict_us, grown),
        "rust": figures(100, 300, 2_000),
        "nothing": figures(1, 1, 100),
    }
    mine, peer = compare(runs, page_size=16)
    assert met(mine) == expected
    assert met(peer) == "-"


def test_no_tree_is_a_subject_too() -> None:
    assert measure(Nothing(), Load(16, num_programs=1)).us["evict"] > 0
