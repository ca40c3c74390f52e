"""Anchors in a tree: which nodes they hold, and what label a node has."""

from __future__ import annotations

import pytest

from kvtier.ids import Label
from kvtier.tree import holders
from kvtier.tree.holders import RANKS, Anchor, label_of, num_holders, place

from .plain_tree import Node, RadixTree, counts_of, num_ends_of

# Two branches of three nodes each leave a common node.
PATHS = ("1", "12", "123", "1234", "15", "156", "1567")


@pytest.fixture
def tree() -> RadixTree:
    tree = RadixTree()
    for path in PATHS:
        tree.insert(tuple(map(int, path)))
    return tree


def node_of(tree: RadixTree, path: str) -> Node:
    node = tree.match(tuple(map(int, path)))
    assert node.path == tuple(map(int, path))
    return node


def held(tree: RadixTree) -> dict[str, list[int]]:
    """Counts of all nodes that somebody holds."""
    found = {"".join(map(str, node.path)): counts_of(node) for node in tree.nodes()}
    return {path: counts for path, counts in found.items() if any(counts)}


def prefixes(path: str, counts: list[int]) -> dict[str, list[int]]:
    return {path[:length]: counts for length in range(1, len(path) + 1)}


def anchored(tree: RadixTree, path: str, label: Label = Label.BUSY) -> Anchor:
    anchor = Anchor("p", RANKS[label])
    place(anchor, node_of(tree, path))
    return anchor


@pytest.mark.parametrize("end", ["", *PATHS])
@pytest.mark.parametrize("start", ["", *PATHS])
@pytest.mark.parametrize("counted", [True, False])
def test_an_anchor_holds_the_path_to_where_it_was_placed_last(
    tree: RadixTree, start: str, end: str, counted: bool
) -> None:
    anchor = anchored(tree, start)
    holders.set_counted(anchor, counted)
    place(anchor, node_of(tree, end))
    assert held(tree) == (prefixes(end, [0, 0, 1]) if counted else {})
    ends = [node for node in tree.nodes() if num_ends_of(node)]
    assert ends == ([node_of(tree, end)] if end else [])


def test_an_anchor_that_is_placed_nowhere_holds_nothing(tree: RadixTree) -> None:
    anchor = anchored(tree, "123")
    place(anchor, None)
    assert held(tree) == {}
    assert anchor.node is None


@pytest.mark.parametrize(
    ("holders", "label"),
    [
        ([], Label.INACTIVE),
        ([Label.INACTIVE], Label.INACTIVE),
        ([Label.INACTIVE, Label.IDLE], Label.IDLE),
        ([Label.IDLE, Label.IDLE], Label.IDLE),
        ([Label.BUSY, Label.INACTIVE], Label.BUSY),
        ([Label.INACTIVE, Label.BUSY, Label.IDLE], Label.BUSY),
    ],
)
def test_a_node_has_the_label_of_its_busiest_holder(
    tree: RadixTree, holders: list[Label], label: Label
) -> None:
    for one, path in zip(holders, ("123", "156", "1"), strict=False):
        anchored(tree, path, one)
    assert label_of(node_of(tree, "1")) is label
    assert num_holders(node_of(tree, "1")) == len(holders)


def test_a_node_gets_the_label_of_the_next_busiest_when_the_busiest_leaves(
    tree: RadixTree,
) -> None:
    anchors = [anchored(tree, "12", label) for label in (Label.INACTIVE, Label.IDLE, Label.BUSY)]
    found = []
    while anchors:
        found.append(label_of(node_of(tree, "1")))
        place(anchors.pop(), None)
    assert found == [Label.BUSY, Label.IDLE, Label.INACTIVE]


def test_relabelling_an_anchor_relabels_its_path_and_nothing_beside_it(tree: RadixTree) -> None:
    anchor = anchored(tree, "12")
    anchored(tree, "156", Label.IDLE)
    holders.set_rank(anchor, RANKS[Label.INACTIVE])
    assert held(tree) == {"1": [1, 1, 0], "12": [1, 0, 0], "15": [0, 1, 0], "156": [0, 1, 0]}


def test_an_anchor_that_is_not_counted_takes_a_new_label_only_when_it_counts_again(
    tree: RadixTree,
) -> None:
    anchor = anchored(tree, "12")
    holders.set_counted(anchor, False)
    holders.set_rank(anchor, RANKS[Label.IDLE])
    assert held(tree) == {}
    holders.set_counted(anchor, True)
    assert held(tree) == prefixes("12", [0, 1, 0])


@pytest.mark.parametrize("counted", [True, False])
def test_counting_an_anchor_twice_changes_nothing(tree: RadixTree, counted: bool) -> None:
    anchor = anchored(tree, "12")
    holders.set_counted(anchor, counted)
    before = held(tree)
    holders.set_counted(anchor, counted)
    assert held(tree) == before


def test_whoever_held_a_node_holds_both_parts_after_a_split() -> None:
    tree = RadixTree()
    tree.insert((1, 2, 3, 4))
    anchor = anchored(tree, "1234")
    anchored(tree, "12", Label.IDLE)
    assert held(tree) == {"12": [0, 1, 1], "1234": [0, 0, 1]}
    place(anchor, None)
    assert held(tree) == {"12": [0, 1, 0]}


def test_an_anchor_of_a_deleted_leaf_ends_at_the_parent_up_to_nowhere(tree: RadixTree) -> None:
    anchor = anchored(tree, "1234")
    for path in ("1234", "123", "12"):
        tree.delete(node_of(tree, path))
        assert held(tree) == prefixes(path[:-1], [0, 0, 1])
        assert anchor.node is node_of(tree, path[:-1])
    for path in ("1567", "156", "15", "1"):
        tree.delete(node_of(tree, path))
    assert anchor.node is None
    assert all(getattr(node, "holding", None) is None for node in tree.deleted)


def test_nobody_holds_a_node_that_comes_back_after_its_deletion(tree: RadixTree) -> None:
    anchor = anchored(tree, "1234")
    tree.delete(node_of(tree, "1234"))
    tree.insert((1, 2, 3, 4))
    assert held(tree) == prefixes("123", [0, 0, 1])
    place(anchor, None)
    assert held(tree) == {}


def test_an_anchor_that_is_not_counted_keeps_its_place_through_splits_and_deletions() -> None:
    tree = RadixTree()
    tree.insert((1, 2, 3))
    anchor = anchored(tree, "123")
    holders.set_counted(anchor, False)
    tree.split(node_of(tree, "123"), 1)
    tree.delete(node_of(tree, "123"))
    holders.set_counted(anchor, True)
    assert held(tree) == {"1": [0, 0, 1]}


def test_a_split_or_deletion_of_a_node_that_nobody_holds_leaves_no_trace() -> None:
    tree = RadixTree()
    leaf = tree.insert((1, 2, 3))
    front = tree.split(leaf, 1)
    tree.delete(leaf)
    assert getattr(front, "holding", None) is None
    assert getattr(leaf, "holding", None) is None


class WatchedNode(Node):
    """Counts how often somebody goes up."""

    steps = 0

    @property
    def parent(self) -> Node | None:
        WatchedNode.steps += 1
        return self._parent

    @parent.setter
    def parent(self, parent: Node | None) -> None:
        self._parent = parent


def test_going_one_node_deeper_takes_no_walk_to_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedNode, "steps", 0)
    chain = [WatchedNode((), None)]
    for token in range(1000):
        chain.append(WatchedNode((token,), chain[-1]))
    anchor = Anchor("p", RANKS[Label.BUSY])
    place(anchor, chain[-2])
    WatchedNode.steps = 0
    place(anchor, chain[-1])
    assert WatchedNode.steps < 10
    assert label_of(chain[-1]) is label_of(chain[1]) is Label.BUSY
