"""Nodes of the tree: runs of tokens whose pages share one fate."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kvtier.tree.holders import Holding
from kvtier.tree.keys import ChildKey, Namespace, Pages, Tokens

if TYPE_CHECKING:
    from kvtier.tree.transfers import Transfer


Order = tuple[int, int, int, int]
"""Class, last access, later in the prompt, node id: the smallest leaves a tier first."""


class Tier(IntEnum):
    """Where a page can be."""

    HBM = 0
    DRAM = 1

    @property
    def other(self) -> Tier:
        """The tier at the other end of a copy."""
        return Tier(1 - self)


class State(IntEnum):
    """What a node's pages are in one tier: a copy's target is WRITING, its source READING."""

    ABSENT = 0
    WRITING = 1
    PRESENT = 2
    READING = 3


class Node:
    """A run of whole pages; all have the same state per tier, the same locks, the same holders.

    `tokens` is int32[size]; pages are int32[size / page_size] in each tier where the node is.
    `start` counts the tokens before it. Buffers may have room at their end.
    """

    __slots__ = (
        "_pages",
        "_tokens",
        "below",
        "children",
        "dead",
        "holding",
        "id",
        "last_access",
        "locks",
        "parent",
        "pins",
        "queued",
        "size",
        "start",
        "states",
        "transfer",
    )

    def __init__(self, parent: Node | None, node_id: int, start: int) -> None:
        self.parent = parent
        self.id = node_id
        self.start = start
        self.size = 0
        self.below = [0, 0]  # pages of its descendants in the tier
        self.children: dict[ChildKey, Node] = {}
        self.states = [State.ABSENT, State.ABSENT]
        self.locks = 0  # requests and copies that protect it
        self.pins = 0  # requests alone
        self.holding: Holding | None = None
        self.last_access = 0
        self.queued: list[Order | None] = [None, None]
        self.transfer: Transfer | None = None
        self.dead = False
        self._tokens: Tokens = _NONE
        self._pages: list[Pages | None] = [None, None]

    def __lt__(self, other: Node) -> bool:
        """Older nodes first: heaps compare nodes whose order is the same."""
        return self.id < other.id

    @property
    def tokens(self) -> Tokens:
        """int32[size], a view."""
        return self._tokens[: self.size]

    def is_in(self, tier: Tier) -> bool:
        """Whether the tier has pages for it, whole or on their way."""
        return self.states[tier] is not State.ABSENT

    @property
    def end(self) -> int:
        """Tokens from the root to the end of the node."""
        return self.start + self.size

    def pages(self, tier: Tier, page_size: int) -> Pages:
        """The node's page ids in a tier where it is, a view."""
        pages = self._pages[tier]
        assert pages is not None
        return pages[: self.size // page_size]

    def set_pages(self, tier: Tier, pages: Pages | None) -> None:
        """Own a copy of the page ids, or none."""
        self._pages[tier] = None if pages is None else pages.copy()

    def set_tokens(self, tokens: Tokens) -> None:
        """Own a copy of the tokens."""
        self._tokens, self.size = tokens.copy(), tokens.size

    def grow(
        self, tokens: Tokens, pages: tuple[Pages | None, Pages | None], page_size: int
    ) -> None:
        """Add whole pages at the end, with their ids in the tiers where the node is."""
        used = self.size // page_size
        self._tokens = _appended(self._tokens, self.size, tokens)
        for tier, more in enumerate(pages):
            mine = self._pages[tier]
            if mine is not None and more is not None:
                self._pages[tier] = _appended(mine, used, more)
        self.size += tokens.size

    def move_all(self, target: Node, page_size: int) -> None:
        """Append all of the node to `target`, which is in the same tiers."""
        num_pages = self.size // page_size
        hbm, dram = (None if p is None else p[:num_pages] for p in self._pages)
        target.grow(self.tokens, (hbm, dram), page_size)

    def move_front(self, target: Node, size: int, page_size: int) -> None:
        """Move the first `size` tokens to the new node `target`, with all that is true of them."""
        cut, used = size // page_size, self.size // page_size
        target.set_tokens(self._tokens[:size])
        target._pages = [None if p is None else p[:cut].copy() for p in self._pages]
        target.states, target.locks, target.pins = list(self.states), self.locks, self.pins
        target.last_access = self.last_access
        self._tokens = self._tokens[size : self.size].copy()
        self._pages = [None if p is None else p[cut:used].copy() for p in self._pages]
        self.start += size
        self.size -= size


class Root(Node):
    """What every prompt of a namespace begins at: no tokens, no pages, in no queue."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, 0, 0)
        self.namespace = namespace


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root's child down to `node`, none for a root."""
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


_NONE: Tokens = np.empty(0, np.int32)


def _appended(buffer: Tokens, used: int, more: Tokens) -> Tokens:
    """`buffer` with `more` after its first `used` entries; it grows by an eighth at least."""
    need = used + more.size
    if need > buffer.size:
        larger = np.empty(max(need, used + used // 8), np.int32)
        larger[:used] = buffer[:used]
        buffer = larger
    buffer[used:need] = more
    return buffer
