"""Prompts that are computed while a part of them is being loaded."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import State, Tier
from kvtier.tree.transfers import Transfer
from kvtier.tree.tree import RadixTree


def loading() -> tuple[RadixTree, Transfer]:
    """Tokens 1 to 4 in HBM; 5 to 8 in DRAM, on their way to HBM pages 10 to 13."""
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    tree.begin("r", "p", tree.match([1, 2, 3, 4]))
    node = tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7]).node
    tree.finish(tree.copy_to(Tier.DRAM, [node], [0, 1, 2, 3]), well=True)
    assert tree.evict(Tier.HBM, 4) is not None
    return tree, tree.copy_to(Tier.HBM, [node], [10, 11, 12, 13])


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_pages_computed_beside_a_load_stay_with_their_request(first: int, well: bool) -> None:
    """Otherwise it would read pages that are being written, or lose its own to a failed load."""
    tree, transfer = loading()
    prompt, mine = list(range(1, 11)), list(range(20, 30))
    node, duplicates, end = tree.insert(prompt, mine[first:], first_page=first)
    assert end == node.end == 4
    assert duplicates.tolist() == mine[first:4]
    assert tree.match(prompt)[1:] == (8, 4)
    tree.finish(transfer, well=well)
    node, duplicates, end = tree.insert(prompt, mine[4:], first_page=4)
    assert end == 10
    assert duplicates.tolist() == (mine[4:8] if well else [])
    assert tree.match(prompt)[1:] == (10, 10)
    check_integrity(tree)


def test_a_request_that_waits_for_the_load_inserts_what_follows() -> None:
    tree, transfer = loading()
    node, duplicates, end = tree.insert(list(range(1, 11)), [20, 21], first_page=8)
    assert (end, duplicates.tolist()) == (10, [])
    assert node.states == [State.PRESENT, State.ABSENT]
    tree.finish(transfer, well=True)
    assert tree.match(np.arange(1, 11))[1:] == (10, 10)
    check_integrity(tree)


def test_what_follows_a_load_that_failed_is_kept() -> None:
    tree, transfer = loading()
    tree.insert(list(range(1, 11)), [20, 21], first_page=8)
    assert tree.finish(transfer, well=False).tolist() == [10, 11, 12, 13]
    assert tree.match(np.arange(1, 11))[1:] == (10, 4)
    check_integrity(tree)
