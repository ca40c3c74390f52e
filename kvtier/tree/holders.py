"""Which programs hold which nodes of a radix tree, counted by label.

An anchor is the end of one prompt of a program; it holds every node from there to the root. A
node's label is the busiest of its anchors, by counts (MORI section 4.3.2: a label follows the
program's queue). Moving or relabelling an anchor costs one step per node of its path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtier.ids import Label

Node = Any
"""Any tree's node that has `parent`, None at the root; its `holding` is kept here."""

RANKS = {Label.INACTIVE: 0, Label.IDLE: 1, Label.BUSY: 2}
_LABELS = tuple(RANKS)


@dataclass(eq=False)
class Anchor:
    """Holds the nodes from `node` up to the root; nothing while `node` is None.

    While it is not `counted`, it keeps its place in the tree but gives no node a label.
    """

    program: str
    rank: int
    node: Node | None = None
    counted: bool = True


@dataclass(eq=False, slots=True)
class Holding:
    """What a node knows of its holders: anchors by rank, and those that end here."""

    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    anchors: dict[Anchor, None] = field(default_factory=dict)


def rank_of(node: Node) -> int:
    """2 where a BUSY program holds the node, 1 where only IDLE ones do, else 0."""
    holding: Holding | None = getattr(node, "holding", None)
    if holding is None:
        return 0
    _, idle, busy = holding.counts
    return 2 if busy else 1 if idle else 0


def label_of(node: Node) -> Label:
    """The busiest label among the node's holders; INACTIVE without any."""
    return _LABELS[rank_of(node)]


def num_holders(node: Node) -> int:
    """Anchors that hold the node."""
    holding: Holding | None = getattr(node, "holding", None)
    return 0 if holding is None else sum(holding.counts)


def place(anchor: Anchor, node: Node | None) -> None:
    """Let the anchor end at `node` (the root or None: nowhere)."""
    target = node if node is not None and node.parent is not None else None
    old = anchor.node
    if target is old:
        return
    joined = anchor.counted and _count(target, anchor.rank, 1, stop=old)
    if old is not None:
        del old.holding.anchors[anchor]
        if anchor.counted and not joined:
            _count(old, anchor.rank, -1)
    anchor.node = target
    if target is not None:
        _holding(target).anchors[anchor] = None


def set_counted(anchor: Anchor, counted: bool) -> None:
    """Let the anchor label its nodes, or stop doing so."""
    if anchor.counted is not counted:
        anchor.counted = counted
        _count(anchor.node, anchor.rank, 1 if counted else -1)


def set_rank(anchor: Anchor, rank: int) -> None:
    """Relabel the anchor and the nodes that it holds."""
    if anchor.counted:
        _count(anchor.node, anchor.rank, -1)
        _count(anchor.node, rank, 1)
    anchor.rank = rank


def split(new_parent: Node, child: Node) -> None:
    """`new_parent` took over the front of `child`: whoever held the child holds both."""
    holding: Holding | None = getattr(child, "holding", None)
    if holding is not None:
        new_parent.holding = Holding(list(holding.counts))


def delete(node: Node) -> None:
    """The leaf leaves the tree: its anchors end at its parent, which they hold already."""
    holding: Holding | None = getattr(node, "holding", None)
    if holding is None:
        return
    node.holding = None
    parent = node.parent if node.parent.parent is not None else None
    for anchor in holding.anchors:
        anchor.node = parent
        if parent is not None:
            _holding(parent).anchors[anchor] = None


def _holding(node: Node) -> Holding:
    holding: Holding | None = getattr(node, "holding", None)
    if holding is None:
        holding = node.holding = Holding()
    return holding


def _count(node: Node | None, rank: int, step: int, stop: Node | None = None) -> bool:
    """Add to the counts from `node` to below `stop` or the root; True where it met `stop`."""
    while node is not None and node.parent is not None:
        if node is stop:
            return True
        _holding(node).counts[rank] += step
        node = node.parent
    return False
