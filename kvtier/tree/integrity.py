"""Everything that must be true of a tree at rest, recomputed from its nodes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvtier.errors import TreeError
from kvtier.tree.counters import TierPages
from kvtier.tree.holders import num_holders
from kvtier.tree.keys import child_key
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.tree import RadixTree

_ABSENT, _WRITING, _PRESENT, _READING = State
_LEGAL = {
    (_PRESENT, _ABSENT),
    (_ABSENT, _PRESENT),
    (_PRESENT, _PRESENT),
    (_READING, _WRITING),
    (_WRITING, _READING),
}
"""States in (HBM, DRAM): at least one copy is whole, and a copy has both its ends."""


def check_integrity(tree: RadixTree) -> None:
    """Raise TreeError with the first thing that is wrong. O(nodes and pages)."""
    nodes = list(tree.nodes())
    _require(
        len(nodes) == tree.num_nodes, f"{tree.num_nodes} nodes are counted, {len(nodes)} exist"
    )
    for node in nodes:
        _check_node(tree, node)
    _check_counters(tree, nodes)
    _check_pages(tree, nodes)
    _check_holders(tree, nodes)
    _check_queues(tree, nodes)


def _check_node(tree: RadixTree, node: Node) -> None:
    name, parent = f"node {node.id}", node.parent
    assert parent is not None
    _require(not node.dead, f"{name} is dead and in the tree")
    _require(node.size > 0 and node.size % tree.page_size == 0, f"{name} has {node.size} tokens")
    _require(node.start == parent.end, f"{name} begins at {node.start}, not {parent.end}")
    key = child_key(node.tokens, 0, tree.page_size)
    _require(parent.children.get(key) is node, f"{name} lies under another key")
    _require(tuple(node.states) in _LEGAL, f"{name} is {node.states}")
    for tier in Tier:
        below = sum(
            c.below[tier] + tree.num_pages(c) * c.is_in(tier) for c in node.children.values()
        )
        _require(node.below[tier] == below, f"{name} counts {node.below[tier]} below, not {below}")
    _require(0 <= node.pins <= node.locks, f"{name} has {node.pins} pins, {node.locks} locks")
    copying = _WRITING in node.states
    _require(copying == (node.transfer is not None), f"{name} and its transfer disagree")
    _require(not copying or node.locks > 0, f"{name} is copied unprotected")
    locks = [child.locks for child in node.children.values()]
    _require(node.locks >= max(locks, default=0), f"{name} is less protected than what follows it")


def _check_counters(tree: RadixTree, nodes: list[Node]) -> None:
    for tier in Tier:
        expected = TierPages()
        for node in nodes:
            expected.add(
                node, tier, tree.num_pages(node), keep_duplicates=tree.rules.keep_duplicates
            )
        _require(expected == tree.pages[tier], f"{tier.name}: {tree.pages[tier]}, not {expected}")


def _check_pages(tree: RadixTree, nodes: list[Node]) -> None:
    for tier in Tier:
        held = [n.pages(tier, tree.page_size) for n in nodes if n.states[tier] is not _ABSENT]
        pages = np.concatenate(held) if held else np.empty(0, np.int32)
        _require(np.unique(pages).size == pages.size, f"{tier.name}: a page lies in two places")


def _check_holders(tree: RadixTree, nodes: list[Node]) -> None:
    anchors = [anchor for program in tree.programs for anchor in program.anchors()]
    expected: Counter[Node] = Counter()
    for anchor in anchors:
        node = anchor.node
        while node is not None and node.parent is not None:
            expected[node] += 1
            node = node.parent
    for node in nodes:
        found = num_holders(node)
        _require(found == expected[node], f"node {node.id}: {found} holders, not {expected[node]}")


def _check_queues(tree: RadixTree, nodes: list[Node]) -> None:
    for tier, queue in tree.queues.items():
        missing = queue.missing(nodes)
        _require(not missing, f"{tier.name}: candidates {missing} are not queued")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise TreeError(f"the tree is broken: {message}")
