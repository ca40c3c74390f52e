"""Make room in a tier: pages leave in its order, exactly as many as are asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvtier.tree.keys import Pages
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.structure import Structure


@dataclass
class Evicted:
    """Page ids to give back. `lost` counts pages whose only copy went."""

    pages: dict[Tier, list[Pages]] = field(default_factory=lambda: {tier: [] for tier in Tier})
    lost: int = 0

    def ids(self, tier: Tier) -> Pages:
        """int32[n] page ids of a tier that are free now."""
        pages = self.pages[tier]
        return np.concatenate(pages) if pages else np.empty(0, np.int32)


def evict(tree: Structure, tier: Tier, num_pages: int) -> Evicted | None:
    """Free `num_pages` of the tier, or none: None where fewer are evictable.

    HBM: a page with a copy in DRAM stays there, one without is lost, and with it what follows it in
    DRAM, which nothing could reach. DRAM: duplicates of pages in HBM cost nothing.
    """
    if tree.pages[tier].evictable < num_pages:
        return None
    evicted = Evicted()
    left = num_pages
    while left > 0:
        node = tree.queues[tier].pop()
        assert node is not None, "evictable pages without a candidate"
        left -= _evict_end(tree, node, tier, left, evicted)
    return evicted


def victims(tree: Structure, num_pages: int) -> list[Node]:
    """The nodes that leave HBM next, in order; see RadixTree.first_to_leave."""
    queue, left = tree.queues[Tier.HBM], num_pages
    chosen: list[Node] = []
    gone: Counter[Node] = Counter()  # pages of what is below a node in HBM

    def bare(node: Node) -> bool:
        there = node.parent is not None and node.states[Tier.HBM] is State.PRESENT
        return there and not node.dead and not node.locks and node.below[Tier.HBM] == gone[node]

    while left > 0 and (node := queue.pop(also=bare)) is not None:
        if tree.num_pages(node) > left:
            tree.split(node, node.size - left * tree.page_size)
        left -= tree.num_pages(node)
        chosen.append(node)
        count = tree.num_pages(node) + node.below[Tier.HBM]
        above = node.parent
        while above is not None and not above.is_in(Tier.HBM):  # a gap goes with what is below it
            gone[above] += count
            above = above.parent
        if above is not None:
            gone[above] += count
            if bare(above):
                queue.push(above)
    for node in chosen:
        tree.offer(node)
    return chosen


def _evict_end(tree: Structure, node: Node, tier: Tier, most: int, evicted: Evicted) -> int:
    """Free up to `most` pages at the node's end; returns how many."""
    num_pages = min(most, tree.num_pages(node))
    alone = node.states[tier.other] is State.ABSENT
    if alone and not node.children:
        _lose(tree, node, num_pages, evicted)
        return num_pages
    if num_pages < tree.num_pages(node):
        tree.split(node, node.size - num_pages * tree.page_size)
    if alone:
        _lose_below(tree, node, evicted)
        _lose(tree, node, num_pages, evicted)
        return num_pages
    evicted.pages[tier].append(node.pages(tier, tree.page_size).copy())
    with tree.changing(node):
        node.states[tier] = State.ABSENT
        node.set_pages(tier, None)
    tree.offer_above(node)
    # In DRAM alone, or a duplicate no more: its place in the other queue has changed.
    tree.offer(node)
    tree.merge(node)
    return num_pages


def _lose(tree: Structure, leaf: Node, num_pages: int, evicted: Evicted) -> None:
    """Drop the last pages of a leaf, whatever tiers they are in."""
    evicted.lost += num_pages
    if num_pages == tree.num_pages(leaf):
        for tier in Tier:
            if leaf.states[tier] is not State.ABSENT:
                evicted.pages[tier].append(leaf.pages(tier, tree.page_size).copy())
        tree.remove(leaf)
        return
    # The front becomes a node of its own: whoever knows this one must not find other tokens in it.
    evicted.lost -= num_pages
    tree.split(leaf, leaf.size - num_pages * tree.page_size)
    _lose(tree, leaf, num_pages, evicted)


def _lose_below(tree: Structure, node: Node, evicted: Evicted) -> None:
    """Drop all descendants, deepest first."""
    below: list[Node] = []
    stack = list(node.children.values())
    while stack:
        current = stack.pop()
        below.append(current)
        stack.extend(current.children.values())
    for descendant in reversed(below):
        _lose(tree, descendant, tree.num_pages(descendant), evicted)
