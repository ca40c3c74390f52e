"""Everything that must be true of a tier manager at rest, recomputed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvtier.errors import TieringError
from kvtier.memory.pages import Pages
from kvtier.tiering.manager import TierManager
from kvtier.tree.integrity import check_integrity as check_tree
from kvtier.tree.node import Node, State, Tier, path_to


def check_integrity(manager: TierManager) -> None:
    """Raise KvtierError with the first thing that is wrong. O(nodes and pages).

    Every page of a pool is free, in the tree, or one request's: once. Paths that requests hold are
    protected as often as they are held. Promises are those of the requests that wait.
    """
    check_tree(manager.tree)
    for pool in manager.pools.values():
        pool.check_integrity()
    _check_pages(manager)
    _check_pins(manager)
    promised = sum(want.missing for want in manager.room.waiting)
    _require(promised == manager.room.promised, f"{manager.room.promised} promised, not {promised}")
    _require(manager.room.available >= 0, f"{-manager.room.available} pages too many are promised")
    copied = {node.transfer for node in manager.tree.nodes() if node.transfer is not None}
    _require(len(copied) == len(manager.traffic), "a copy of the tree has no move, or the reverse")


def _check_pages(manager: TierManager) -> None:
    held: dict[Tier, list[Pages]] = {tier: [] for tier in Tier}
    for node in manager.tree.nodes():
        for tier in Tier:
            if node.states[tier] is not State.ABSENT:
                held[tier].append(node.pages(tier, manager.tree.page_size))
    for lease in manager.leases:
        held[Tier.HBM] += [lease.own, *(lease.want.pages if lease.want is not None else ())]
    for tier, pool in manager.pools.items():
        pages = np.concatenate([np.empty(0, np.int32), *held[tier]])
        _require(np.unique(pages).size == pages.size, f"{tier.name}: a page has two owners")
        _require(
            pages.size == pool.num_taken,
            f"{tier.name}: {pool.num_taken} pages are taken, {pages.size} are somebody's",
        )


def _check_pins(manager: TierManager) -> None:
    pins: Counter[Node] = Counter()
    for lease in manager.leases:
        pins.update(path_to(lease.node))
    for node in manager.tree.nodes():
        _require(
            node.pins == pins[node], f"node {node.id} has {node.pins} pins, {pins[node]} holders"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise TieringError(f"the tier manager is broken: {message}")
