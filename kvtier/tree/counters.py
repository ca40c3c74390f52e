"""How many pages a tier holds, kept up to date node by node."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.tree.node import Node, State, Tier


@dataclass
class TierPages:
    """Pages of one tier; evictable + protected + in_flight = all that the tree holds in it.

    `in_flight` pages are written or read by a copy, `protected` ones may be read by a running
    request or lie before such pages. `pinned` are those that a request protects, whatever else is
    true of them: total - pinned is what can be had once all copies have ended.
    """

    evictable: int = 0
    protected: int = 0
    in_flight: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        return self.evictable + self.protected + self.in_flight

    def add(self, node: Node, tier: Tier, num_pages: int, *, keep_duplicates: bool) -> None:
        """Count `num_pages` of the node, or take them off where negative."""
        state = node.states[tier]
        if state is State.PRESENT:
            duplicate = tier is Tier.DRAM and node.states[Tier.HBM] is not State.ABSENT
            if keep_duplicates if duplicate else node.locks:
                self.protected += num_pages
            else:
                self.evictable += num_pages
        elif state is not State.ABSENT:
            self.in_flight += num_pages
        if node.pins and state is not State.ABSENT:
            self.pinned += num_pages
