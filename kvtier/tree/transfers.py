"""Copies of nodes between the tiers, as the tree sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.tree.keys import Pages
from kvtier.tree.node import Node, State, Tier


@dataclass(eq=False)
class Transfer:
    """A copy of whole nodes to `target`. A node that is split meanwhile stays in it, in parts.

    `owner` is the tree; `ends` are the nodes whose paths the copy protects.
    """

    target: Tier
    nodes: list[Node]
    page_size: int
    owner: object
    ends: list[Node] = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        self.ends = list(self.nodes)

    @property
    def source_pages(self) -> Pages:
        """int32[n] page ids to read."""
        return self._pages(self.target.other)

    @property
    def target_pages(self) -> Pages:
        """int32[n] page ids to write, in the order of `source_pages`."""
        return self._pages(self.target)

    def start(self, node: Node) -> None:
        """Its source is READING from now on, its target WRITING."""
        node.transfer = self
        node.states[self.target] = State.WRITING
        node.states[self.target.other] = State.READING

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the front of `lower`, whose end is protected as before."""
        self.nodes.insert(self.nodes.index(lower), upper)
        upper.transfer = self

    def end(self, node: Node, *, well: bool) -> None:
        """Its copy is there, or it is as it was before."""
        node.transfer = None
        node.states[self.target.other] = State.PRESENT
        node.states[self.target] = State.PRESENT if well else State.ABSENT
        if not well:
            node.set_pages(self.target, None)

    def _pages(self, tier: Tier) -> Pages:
        if not self.nodes:
            return np.empty(0, np.int32)
        return np.concatenate([node.pages(tier, self.page_size) for node in self.nodes])
