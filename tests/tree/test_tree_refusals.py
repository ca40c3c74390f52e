"""Input that does not fit: one TreeError, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.errors import TreeError
from kvtier.ids import Label
from kvtier.tree.integrity import check_integrity
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, Tier
from kvtier.tree.tree import Match, RadixTree

from .model import nodes_of, seen_of

PAGE = 4
BAD_IDS = {
    "floats": [1.0, 2.0, 3.0, 4.0],
    "texts": ["1", "2", "3", "4"],
    "truth values": [True, False, True, False],
    "negative": [1, 2, 3, -1],
    "2^31": [1, 2, 3, 2**31],
    "2^63": [1, 2, 3, 2**63],
    "2^70": [1, 2, 3, 2**70],
    "two dimensions": [[1, 2, 3, 4]] * 4,
    "ragged": [[1], [1, 2], [3], [4]],
    "nothing": [None] * 4,
    "unsigned": np.array([1, 2, 3, 2**32 - 1], np.uint32),
}


class Filled:
    """A tree in which each kind of node has a name."""

    def __init__(self) -> None:
        self.tree = tree = RadixTree(PAGE)
        self.hbm = self.add(1, 0)
        self.both, self.dram = self.add(2, 10), self.add(3, 20)
        tree.finish(tree.copy_to(Tier.DRAM, [self.both, self.dram], [0, 1, 2, 3]), well=True)
        self.evict_hbm_of(self.dram)
        tree.begin("r", "p", tree.match([1] * 2 * PAGE), label=Label.IDLE, epoch=3)
        self.below = tree.insert([1] * 2 * PAGE + [9] * PAGE, [0, 1, 30]).node
        self.dead = self.add(4, 40)

    def add(self, token: int, page: int) -> Node:
        return self.tree.insert([token] * 2 * PAGE, [page, page + 1]).node

    def evict_hbm_of(self, node: Node) -> None:
        self.tree.protect(self.hbm)
        self.tree.protect(self.both)
        assert self.tree.evict(Tier.HBM, self.tree.num_pages(node)) is not None
        self.tree.unprotect(self.both)
        self.tree.unprotect(self.hbm)

    def kill(self) -> Node:
        """A node that is no more."""
        for node in (self.hbm, self.below, self.both):
            self.tree.protect(node)
        assert self.tree.evict(Tier.HBM, 2) is not None
        for node in (self.hbm, self.below, self.both):
            self.tree.unprotect(node)
        assert self.dead.dead
        return self.dead

    def seen(self) -> Any:
        nodes = nodes_of(self.tree)
        programs = [(p.name, p.label, p.epoch, list(p.runs)) for p in self.tree.programs]
        return seen_of(self.tree, nodes), nodes, repr(self.tree.pages), programs


def refuses(filled: Filled, act: Callable[[], object]) -> None:
    before = filled.seen()
    with pytest.raises(TreeError):
        act()
    assert filled.seen() == before
    check_integrity(filled.tree)


@pytest.fixture
def filled() -> Filled:
    return Filled()


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_tree_without_a_page_size_is_refused(page_size: int) -> None:
    with pytest.raises(TreeError):
        RadixTree(page_size)


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize("use", ["match", "insert", "pages", "copy"])
def test_what_is_no_list_of_ids_is_refused(filled: Filled, use: str, bad: Any) -> None:
    tree = filled.tree
    acts: dict[str, Callable[[], object]] = {
        "match": lambda: tree.match(bad),
        "insert": lambda: tree.insert(bad, [50]),
        "pages": lambda: tree.insert([7] * 4 * PAGE, bad),
        "copy": lambda: tree.copy_to(Tier.DRAM, [filled.hbm, filled.below], bad),
    }
    refuses(filled, acts[use])


@pytest.mark.parametrize(
    ("tokens", "pages", "first_page"),
    [
        ([7] * PAGE, [], 0),
        ([7] * PAGE, [50, 51], 0),
        ([7] * (PAGE - 1), [50], 0),
        ([7] * (2 * PAGE - 1), [50, 51], 0),
        ([7] * 2 * PAGE, [50, 51], 1),
        ([7] * 2 * PAGE, [50, 51, 52], -1),
        ([7] * 2 * PAGE, [51], 1),
        ([7] * PAGE, [], 2),
        ([3] * 3 * PAGE, [52], 2),
        ([1] * 2 * PAGE + [7] * 2 * PAGE, [53], 3),
        ([3] * 2 * PAGE, [51], 1),
    ],
)
def test_pages_that_do_not_fit_the_tokens_or_the_tree_are_refused(
    filled: Filled, tokens: list[int], pages: list[int], first_page: int
) -> None:
    filled.tree.match(tokens)  # splits are no change of what is there
    refuses(filled, lambda: filled.tree.insert(tokens, pages, first_page=first_page))


@pytest.mark.parametrize(
    "use", ["begin", "rematch", "publish", "protect", "unprotect", "copy down", "copy up"]
)
def test_a_node_that_is_no_more_is_refused(filled: Filled, use: str) -> None:
    tree, dead = filled.tree, filled.kill()
    match = Match(dead, 2 * PAGE, 2 * PAGE)
    acts: dict[str, Callable[[], object]] = {
        "begin": lambda: tree.begin("new", "q", match, label=Label.BUSY),
        "rematch": lambda: tree.rematch("r", match),
        "publish": lambda: tree.publish("r", dead),
        "protect": lambda: tree.protect(dead),
        "unprotect": lambda: tree.unprotect(dead),
        "copy down": lambda: tree.copy_to(Tier.DRAM, [filled.hbm, dead], [50, 51, 52, 53]),
        "copy up": lambda: tree.copy_to(Tier.HBM, [dead], [50, 51]),
    }
    refuses(filled, acts[use])


def test_an_unprotect_of_what_nobody_protects_is_refused(filled: Filled) -> None:
    refuses(filled, lambda: filled.tree.unprotect(filled.both))


def test_a_second_unprotect_is_refused(filled: Filled) -> None:
    filled.tree.protect(filled.both)
    filled.tree.unprotect(filled.both)
    refuses(filled, lambda: filled.tree.unprotect(filled.both))


def test_an_unprotect_of_what_only_a_later_node_protects_is_refused(filled: Filled) -> None:
    assert filled.below.parent is filled.hbm
    filled.tree.protect(filled.below)
    refuses(filled, lambda: filled.tree.unprotect(filled.hbm))


@pytest.mark.parametrize("well", [True, False])
def test_an_unprotect_of_what_only_a_copy_protects_is_refused(filled: Filled, well: bool) -> None:
    transfer = filled.tree.copy_to(Tier.DRAM, [filled.below], [50])
    refuses(filled, lambda: filled.tree.unprotect(filled.below))
    filled.tree.finish(transfer, well=well)
    check_integrity(filled.tree)


@pytest.mark.parametrize(
    ("target", "name", "pages"),
    [
        (Tier.DRAM, "both", 2),
        (Tier.HBM, "both", 2),
        (Tier.DRAM, "dram", 2),
        (Tier.HBM, "hbm", 2),
        (Tier.DRAM, "root", 0),
        (Tier.DRAM, "hbm", 1),
        (Tier.DRAM, "hbm", 3),
    ],
)
def test_a_copy_of_what_is_not_there_or_there_already_is_refused(
    filled: Filled, target: Tier, name: str, pages: int
) -> None:
    node = filled.hbm.parent if name == "root" else getattr(filled, name)
    assert node is not None
    refuses(filled, lambda: filled.tree.copy_to(target, [node], list(range(50, 50 + pages))))


@pytest.mark.parametrize("target", Tier)
def test_a_node_that_is_being_copied_is_not_copied_again(filled: Filled, target: Tier) -> None:
    filled.tree.copy_to(Tier.DRAM, [filled.below], [50])
    refuses(filled, lambda: filled.tree.copy_to(target, [filled.below], [51]))


def test_a_node_is_not_copied_twice_at_once(filled: Filled) -> None:
    refuses(filled, lambda: filled.tree.copy_to(Tier.DRAM, [filled.below] * 2, [50, 51]))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_copy_ends_once(filled: Filled, first: bool, second: bool) -> None:
    transfer = filled.tree.copy_to(Tier.DRAM, [filled.below], [50])
    filled.tree.finish(transfer, well=first)
    refuses(filled, lambda: filled.tree.finish(transfer, well=second))


def test_a_copy_that_ended_does_not_end_the_next_of_the_same_node(filled: Filled) -> None:
    tree = filled.tree
    failed = tree.copy_to(Tier.DRAM, [filled.below], [50])
    tree.finish(failed, well=False)
    again = tree.copy_to(Tier.DRAM, [filled.below], [51])
    refuses(filled, lambda: tree.finish(failed, well=True))
    tree.finish(again, well=True)
    assert filled.below.pages(Tier.DRAM, PAGE).tolist() == [51]


def test_a_negative_number_of_pages_is_refused() -> None:
    filled = Filled()
    with pytest.raises(TreeError, match="-1 pages cannot leave"):
        filled.tree.evict(Tier.HBM, -1)


def test_an_empty_copy_ends_once_too() -> None:
    tree = RadixTree(PAGE)
    transfer = tree.copy_to(Tier.DRAM, [], [])
    tree.finish(transfer, well=True)
    with pytest.raises(TreeError, match="ended"):
        tree.finish(transfer, well=True)


def test_looking_up_tenants_that_have_nothing_leaves_no_trace() -> None:
    tree = RadixTree(PAGE)
    for tenant in range(100):
        match = tree.match([1] * PAGE, Namespace(tenant=str(tenant)))
        tree.begin("r", "p", match)
        tree.insert([1], [], Namespace(tenant=str(tenant)), after=match)
    assert tree.roots == {}
    check_integrity(tree)
