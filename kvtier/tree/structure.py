"""The nodes of the tree and what is counted about them: split, merge, lock, remove."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.tree import holders
from kvtier.tree.counters import TierPages
from kvtier.tree.keys import Namespace, Pages, Tokens, child_key
from kvtier.tree.node import Node, Root, State, Tier
from kvtier.tree.order import Queue, Rules

_TIERS = tuple(Tier)  # an enum is slow to iterate over


class Structure:
    """Nodes below one root per namespace; every change keeps counters and queues right."""

    def __init__(self, page_size: int, rules: Rules) -> None:
        self.page_size = page_size
        self.rules = rules
        self.pages = {tier: TierPages() for tier in Tier}
        self.queues = {tier: Queue(tier, rules) for tier in Tier}
        self.roots: dict[Namespace, Root] = {}
        self.num_nodes = 0
        self._next_id = 0
        self._clock = 0

    def root(self, namespace: Namespace) -> Node:
        """The root of the namespace. The tree keeps it while a node is below it."""
        return self.roots.get(namespace) or Root(namespace)

    def child(self, node: Node, tokens: Tokens, at: int) -> Node | None:
        """The child whose first page is the one of `tokens` at `at`."""
        if tokens.size - at < self.page_size:
            return None
        return node.children.get(child_key(tokens, at, self.page_size))

    def num_pages(self, node: Node) -> int:
        """Pages of the node in each tier where it is."""
        return node.size // self.page_size

    def add_leaf(self, parent: Node, tokens: Tokens, pages: Pages) -> Node:
        """A new node in HBM below `parent`; it has the locks of nobody."""
        node = self._new_node(parent, parent.end)
        node.set_tokens(tokens)
        node.states[Tier.HBM] = State.PRESENT
        node.set_pages(Tier.HBM, pages)
        if isinstance(parent, Root):
            self.roots[parent.namespace] = parent
        parent.children[child_key(tokens, 0, self.page_size)] = node
        self._count_pages(node, 1)
        self._count_above(node, Tier.HBM, self.num_pages(node))
        self.offer(node)
        return node

    def split(self, node: Node, size: int) -> Node:
        """Divide the node after `size` tokens; returns the new front, `node` keeps its end."""
        parent = node.parent
        assert parent is not None
        upper = self._new_node(parent, node.start)
        node.move_front(upper, size, self.page_size)
        rest = self.num_pages(node)
        for tier in _TIERS:
            upper.below[tier] = node.below[tier] + rest * node.is_in(tier)
        parent.children[child_key(upper.tokens, 0, self.page_size)] = upper
        upper.children[child_key(node.tokens, 0, self.page_size)] = node
        node.parent = upper
        holders.split(upper, node)
        if node.transfer is not None:
            node.transfer.split(upper, node)
        self.offer(upper)
        self.offer(node)  # later in the prompt than before
        return upper

    def merge(self, node: Node | None) -> Node | None:
        """Join the node with its only child where both have the same fate; returns the joint node.

        The child goes and the node keeps its identity, so that a chain with one owner is one node.
        """
        child = _only_child(node)
        if node is None or child is None or not _alike(node, child):
            return node
        child.move_all(node, self.page_size)
        node.below = list(child.below)
        node.children, child.children = child.children, {}
        for grandchild in node.children.values():
            grandchild.parent = node
        node.last_access = max(node.last_access, child.last_access)
        holders.delete(child)
        child.dead = True
        self.num_nodes -= 1
        self.offer(node)
        return node

    def remove(self, node: Node) -> None:
        """Take a leaf out; its holders hold its parent on."""
        assert not node.children
        assert node.parent is not None
        self._count_pages(node, -1)
        for tier in _TIERS:
            self._count_above(node, tier, -self.num_pages(node) * node.is_in(tier))
        holders.delete(node)
        del node.parent.children[child_key(node.tokens, 0, self.page_size)]
        if isinstance(node.parent, Root) and not node.parent.children:
            del self.roots[node.parent.namespace]
        node.dead = True
        self.num_nodes -= 1
        self.offer_above(node)
        if not self.num_nodes:
            for queue in self.queues.values():
                queue.clear()

    def lock(self, node: Node, step: int = 1, *, pin: bool = False) -> None:
        """Protect the path up to the root from leaving its tiers, or (-1) end that once.

        A request pins it, a copy does not.
        """
        current: Node | None = node
        while current is not None and current.parent is not None:
            locks, pins = current.locks + step, current.pins + step * pin
            if 0 in (current.locks, locks) or (pin and 0 in (current.pins, pins)):
                self._count_pages(current, -1)
                current.locks, current.pins = locks, pins
                self._count_pages(current, 1)
                if locks == 0:
                    self.offer(current)
            else:
                current.locks, current.pins = locks, pins
            current = current.parent

    @contextmanager
    def changing(self, node: Node) -> Iterator[None]:
        """Count anew what the block changes about the node, and queue it where it can leave."""
        before = [self.num_pages(node) * node.is_in(tier) for tier in _TIERS]
        self._count_pages(node, -1)
        yield
        self._count_pages(node, 1)
        for tier in _TIERS:
            self._count_above(node, tier, self.num_pages(node) * node.is_in(tier) - before[tier])
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Queue the node in the tiers that it can leave."""
        in_hbm, in_dram = node.states
        if in_hbm is State.PRESENT and not node.locks and not node.below[Tier.HBM]:
            self.queues[Tier.HBM].offer(node)
        if in_dram is State.PRESENT:
            self.queues[Tier.DRAM].offer(node)

    def offer_path(self, node: Node | None) -> None:
        """Queue a path anew after its labels fell."""
        while node is not None and node.parent is not None:
            self.offer(node)
            node = node.parent

    def offer_above(self, node: Node) -> None:
        """Queue what is before the node and may be the last in a tier by now."""
        for tier in _TIERS:
            above = node.parent
            while above is not None and above.parent is not None and not above.is_in(tier):
                above = above.parent
            if above is not None:
                self.queues[tier].offer(above)

    def touch(self, node: Node | None) -> None:
        """The path has just been used."""
        self._clock += 1
        while node is not None:
            node.last_access = self._clock
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _count_pages(self, node: Node, sign: int) -> None:
        num_pages = sign * self.num_pages(node)
        for tier in _TIERS:
            self.pages[tier].add(node, tier, num_pages, keep_duplicates=self.rules.keep_duplicates)

    def _count_above(self, node: Node, tier: Tier, num_pages: int) -> None:
        if num_pages:
            above = node.parent
            while above is not None:
                above.below[tier] += num_pages
                above = above.parent

    def _new_node(self, parent: Node, start: int) -> Node:
        self.num_nodes += 1
        self._next_id += 1
        node = Node(parent, self._next_id, start)
        node.last_access = self._clock
        return node


def _only_child(node: Node | None) -> Node | None:
    if node is None or node.parent is None or len(node.children) != 1:
        return None
    return next(iter(node.children.values()))


def _alike(node: Node, child: Node) -> bool:
    """Whether nobody can tell the two apart: same states and holders, nobody protects them."""
    if node.states != child.states or node.locks or child.locks:
        return False
    if node.holding is None:
        return child.holding is None or not any(child.holding.counts)
    if node.holding.anchors:
        return False
    return child.holding is not None and node.holding.counts == child.holding.counts
