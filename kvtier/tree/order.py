"""Who leaves a tier first. LRU inside a class, node id last; design's order for each tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from kvtier.tree.holders import rank_of
from kvtier.tree.node import Node, Order, State, Tier

_BUSY = 2
_DUPLICATE = (0, 2, 1)
_SOLE = (0, 4, 3)
"""Class in DRAM by rank (INACTIVE, IDLE, BUSY) of what HBM has, too, and of sole copies.

Of duplicates, those of IDLE pages go last: these will leave HBM, and their copy is made.
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """How eviction differs from design's order, for peers that know less."""

    labels: bool = True
    """False: all pages count as BUSY (plain LRU)."""
    keep_duplicates: bool = False
    """True: a page in DRAM stays while HBM has it, too (HiCache's write-through)."""


def order_of(node: Node, tier: Tier, rules: Rules) -> Order:
    """Smallest leaves first.

    HBM: INACTIVE, IDLE, BUSY. DRAM: INACTIVE, duplicates (BUSY, IDLE), sole copies (BUSY, IDLE).
    """
    rank = rank_of(node) if rules.labels else _BUSY
    if tier is Tier.DRAM:
        rank = (_SOLE if node.states[Tier.HBM] is State.ABSENT else _DUPLICATE)[rank]
    # One use touches a whole path: what is later in it goes first, however it is cut into nodes.
    return rank, node.last_access, -node.start, node.id


def is_candidate(node: Node, tier: Tier, rules: Rules) -> bool:
    """Whether the node's pages, or those at its end, can leave the tier now.

    A tier is emptied from the ends of prompts; a duplicate in DRAM can go from anywhere.
    """
    if node.dead or node.parent is None or node.states[tier] is not State.PRESENT:
        return False
    if tier is Tier.DRAM and node.states[Tier.HBM] is not State.ABSENT:
        return not rules.keep_duplicates
    if node.locks:
        return False
    if rules.keep_duplicates and tier is Tier.DRAM:  # duplicates below it would never leave
        return all(_in_hbm(child) for child in node.children.values())
    return not node.below[tier]


def _in_hbm(child: Node) -> bool:
    return child.states[Tier.HBM] is not State.ABSENT


class Queue:
    """Candidates of one tier in order: a heap whose entries are checked when they are taken.

    A node knows the order of its entry. While a node is used its order grows, so an entry that is
    too small is put back when its turn comes. Whoever makes a node a candidate, or its order
    smaller (a label that fell, a copy that became a duplicate), offers it.
    """

    def __init__(self, tier: Tier, rules: Rules) -> None:
        self._tier = tier
        self._rules = rules
        self._heap: list[tuple[Order, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Queue the node if it is a candidate and has no entry that is early enough."""
        if is_candidate(node, self._tier, self._rules):
            order, queued = order_of(node, self._tier, self._rules), node.queued[self._tier]
            if queued is None or order < queued:
                self._push(order, node)

    def push(self, node: Node) -> None:
        """Queue a node that is no candidate yet, for a `pop` that takes it all the same."""
        self._push(order_of(node, self._tier, self._rules), node)

    def pop(self, also: Callable[[Node], bool] | None = None) -> Node | None:
        """Take the first candidate, or one that `also` accepts."""
        while self._heap:
            order, node = heappop(self._heap)
            if node.queued[self._tier] != order:
                continue  # there is an earlier entry, or there was
            node.queued[self._tier] = None
            fits = is_candidate(node, self._tier, self._rules)
            if fits or (also is not None and also(node)):
                now = order_of(node, self._tier, self._rules)
                if now <= order:
                    return node
                self._push(now, node)
        return None

    def clear(self) -> None:
        """Forget all entries, with the nodes in them."""
        self._heap.clear()

    def missing(self, nodes: list[Node]) -> list[int]:
        """Ids of candidates without an entry that is early enough; none, unless there is a bug."""
        entries = set(self._heap)
        return [
            node.id
            for node in nodes
            if is_candidate(node, self._tier, self._rules) and self._late(node, entries)
        ]

    def rebuild(self, nodes: list[Node]) -> None:
        """Begin anew from all nodes, without the entries that mean nothing any more."""
        self._heap.clear()
        for node in nodes:
            node.queued[self._tier] = None
            self.offer(node)

    def _push(self, order: Order, node: Node) -> None:
        node.queued[self._tier] = order
        heappush(self._heap, (order, node))

    def _late(self, node: Node, entries: set[tuple[Order, Node]]) -> bool:
        queued = node.queued[self._tier]
        late = queued is None or queued > order_of(node, self._tier, self._rules)
        return late or (queued, node) not in entries
