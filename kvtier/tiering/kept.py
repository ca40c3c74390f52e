"""What is left of a prompt."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.tree.node import Node, State, Tier


class Kept(NamedTuple):
    """How much of a program's last prompt can be read in HBM, and used again at all, in pages."""

    hbm_pages: int
    pages: int


def kept_of(node: Node | None, page_size: int) -> Kept:
    """Of the path to the node, the pages that HBM has before its first gap, and all of them."""
    end = hbm_end = 0 if node is None else node.end
    while node is not None and node.parent is not None:
        state = node.states[Tier.HBM]
        if state is State.ABSENT or state is State.WRITING:
            hbm_end = node.start
        node = node.parent
    return Kept(hbm_end // page_size, end // page_size)
