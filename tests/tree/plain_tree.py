"""A radix tree that tells kvtier of splits and deletions as an engine.s own tree does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.tree import holders

Path = tuple[int, ...]
"""All tokens from the root to the end of a node."""


class Node:
    """`key` are the tokens between the parent and this node."""

    def __init__(self, key: Path, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.evicted = False
        self.backuped = False

    @property
    def path(self) -> Path:
        return self.key if self.parent is None else self.parent.path + self.key


class RadixTree:
    def __init__(self) -> None:
        self.root = Node((), None)
        self.deleted: list[Node] = []

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes() if not node.children]

    def match(self, tokens: Sequence[int]) -> Node:
        """The node that ends where the tokens leave the tree; splits one if it has to."""
        node, rest = self.root, tuple(tokens)
        while rest and rest[0] in node.children:
            child = node.children[rest[0]]
            common = _num_common(child.key, rest)
            if common < len(child.key):
                return self.split(child, common)
            node, rest = child, rest[common:]
        return node

    def insert(self, tokens: Sequence[int]) -> Node:
        """The node that ends with the last of the tokens, new if there was none."""
        node = self.match(tokens)
        rest = tuple(tokens)[len(node.path) :]
        if not rest:
            return node
        leaf = node.children[rest[0]] = Node(rest, node)
        return leaf

    def split(self, child: Node, at: int) -> Node:
        """A new node takes over the first `at` tokens of the child."""
        assert child.parent is not None
        front = Node(child.key[:at], child.parent)
        front.evicted, front.backuped = child.evicted, child.backuped
        child.parent.children[child.key[0]] = front
        child.key, child.parent = child.key[at:], front
        front.children[child.key[0]] = child
        holders.split(front, child)
        return front

    def delete(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        holders.delete(leaf)
        del leaf.parent.children[leaf.key[0]]
        self.deleted.append(leaf)


def counts_of(node: Node) -> list[int]:
    """Anchors that label the node: INACTIVE, IDLE, BUSY."""
    holding: holders.Holding | None = getattr(node, "holding", None)
    return [0, 0, 0] if holding is None else list(holding.counts)


def num_ends_of(node: Node) -> int:
    """Anchors that end at the node, those that label nothing included."""
    holding: holders.Holding | None = getattr(node, "holding", None)
    return 0 if holding is None else len(holding.anchors)


def _num_common(one: Path, other: Path) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
