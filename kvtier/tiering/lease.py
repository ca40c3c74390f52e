"""What a running request has of a worker's KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvtier.memory.pages import Pages
from kvtier.tiering.moves import Move, Why
from kvtier.tiering.room import Want
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, Tier, path_to

NO_PAGES: Pages = np.empty(0, np.int32)


class LeaseState(StrEnum):
    """WAITING for room, LOADING a prefix, READY to compute, FAILED to get room again, ENDED."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Lease:
    """Pages of HBM that one request may read and write.

    The first `cached` pages of its prompt are the tree's, on the path to `node`, which stays where
    it is; `own` pages follow, which nobody else knows. `hbm_pages` and `dram_pages` say where the
    prompt was found: pages of DRAM come after those of HBM, or between them.
    """

    request: str | None
    namespace: Namespace
    node: Node
    num_pages: int
    page_size: int
    hbm_pages: int
    dram_pages: int
    cached: int
    why: Why = Why.LOAD
    on_ready: Callable[[Lease], None] | None = None
    state: LeaseState = LeaseState.WAITING
    own: Pages = field(default_factory=lambda: NO_PAGES)
    want: Want | None = None
    awaits: list[Move] = field(default_factory=list)

    def take(self) -> None:
        """The pages that were wanted are there."""
        assert self.want is not None
        self.own = np.concatenate([self.own, *self.want.pages])
        self.want = None

    def give_to(self, other: Lease, num_pages: int) -> None:
        """Hand over the first of its own pages, as the last of the other's."""
        assert num_pages <= self.own.size, f"{num_pages} pages of {self.own.size}"
        other.own = np.concatenate([other.own, self.own[:num_pages]])
        self.own = self.own[num_pages:].copy()
        other.num_pages += num_pages
        self.num_pages -= num_pages

    @property
    def pages(self) -> Pages:
        """int32[cached + own] page ids in the prompt's order; read it anew after `publish`."""
        path = (node.pages(Tier.HBM, self.page_size) for node in path_to(self.node))
        return np.concatenate([*path, self.own])
