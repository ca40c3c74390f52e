"""In which order pages leave the two tiers: design's order, inside SGLang's Python tree core.

LRU inside a class, node id last. HBM: INACTIVE, IDLE, BUSY. DRAM: INACTIVE, then any duplicate of a
page that is in HBM, then BUSY sole copies, then IDLE sole copies (MORI section 4.3.2: a BUSY
program's pages are in HBM or on their way there, an IDLE one's live in DRAM).
"""

from __future__ import annotations

import heapq
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType, FullComponent

from kvtier.tree import holders
from kvtier.tree.holders import Node, rank_of

Order = tuple[int, float, int]
_DUPLICATE = 1
_SOLE = (0, 3, 2)
"""Class of a sole copy in DRAM by rank: INACTIVE, IDLE, BUSY."""


def device_order(node: Node) -> Order:
    """Smallest leaves HBM first."""
    return rank_of(node), node.last_access_time, node.id


def host_order(node: Node) -> Order:
    """Smallest leaves DRAM first."""
    rank = rank_of(node)
    duplicate = rank > 0 and not node.evicted
    return _DUPLICATE if duplicate else _SOLE[rank], node.last_access_time, node.id


class LabelledFullComponent(FullComponent):
    """SGLang's component for full attention, with labels on its nodes and both eviction orders."""

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.session_ref_eviction_strategy = device_order

    def redistribute_on_node_split(self, new_parent: Node, child: Node) -> None:
        """Divide the child's state; whoever held it holds both."""
        super().redistribute_on_node_split(new_parent, child)
        holders.split(new_parent, child)

    def discard_deleted_session_leaf(self, node: Node) -> None:
        """The node is about to leave the tree."""
        super().discard_deleted_session_leaf(node)
        holders.delete(node)

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: dict[Any, int],
        device_frees: dict[Any, list[Any]],
        host_frees: dict[Any, list[Any]],
        cache_actions: list[Any],
    ) -> None:
        """Free at least `num_tokens` of DRAM, or all that can be freed."""
        core, full = self.tree_core, ComponentType.FULL
        frees = (tracker, device_frees, host_frees)
        duplicates = list(core.full_host_duplicates.values())
        heap = [(host_order(n), n) for n in (*core.evictable_host_leaves, *duplicates)]
        heapq.heapify(heap)
        while tracker[full] < num_tokens and heap:
            _, node = heapq.heappop(heap)
            parent = node.parent
            if node in core.evictable_host_leaves:
                core._evict_host_leaf(node, *frees, cache_actions=cache_actions)
            elif node.id in core.full_host_duplicates and self._may_release(node):
                core._release_full_host_duplicate(node, *frees, cache_actions=cache_actions)
                core.full_host_duplicates.pop(node.id, None)
            else:
                continue
            if parent in core.evictable_host_leaves or parent.id in core.full_host_duplicates:
                heapq.heappush(heap, (host_order(parent), parent))

    def _may_release(self, node: Node) -> bool:
        """Whether the host copy can go while the device copy stays.

        Write-through deletes an unbacked node that leaves HBM and would lose host-only children
        with it, so there the copies below go first, also one that is just being made. Write-back
        copies the node again instead.
        """
        core = self.tree_core
        if not core._can_reclaim_full_host_duplicate(node):
            return False
        if core.is_write_back:
            return True
        coming = self.cache.backed_up_now
        if coming is not None and coming.parent is node:
            return False
        return not any(child.backuped for child in node.children.values())
