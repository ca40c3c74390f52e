"""Pools whose pages have contents, and a mover that ends copies when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.ids import Direction
from kvtier.memory.pages import PageAllocator, Pages
from kvtier.tiering.moves import Move
from kvtier.tree.node import Tier

Content = Hashable
"""Who wrote a page, and when."""
FREED: Content = "freed"
PARTIAL: Content = "a copy under way"


@dataclass
class SlowMover:
    """Copies contents at the end of a move, as late as a real copy may read them."""

    contents: dict[Tier, dict[int, Content]] = field(default_factory=lambda: {t: {} for t in Tier})
    moves: list[Move] = field(default_factory=list)
    hurried: list[Move] = field(default_factory=list)
    started: list[Move] = field(default_factory=list)

    def start(self, move: Move) -> None:
        self.moves.append(move)
        self.started.append(move)
        for page in move.target_pages.tolist():
            self.contents[move.transfer.target][page] = PARTIAL

    def hasten(self, move: Move) -> None:
        assert move in self.moves, "a move that has ended is hurried"
        self.hurried.append(move)

    def copy(self, move: Move) -> None:
        source, target = ends(move)
        pairs = zip(move.source_pages.tolist(), move.target_pages.tolist(), strict=True)
        for page, to in pairs:
            self.contents[target][to] = self.contents[source][page]

    def touched(self, tier: Tier) -> set[int]:
        """Pages that a copy reads or writes now."""
        found: set[int] = set()
        for move in self.moves:
            source, target = ends(move)
            found.update(move.source_pages.tolist() if source is tier else ())
            found.update(move.target_pages.tolist() if target is tier else ())
        return found


def ends(move: Move) -> tuple[Tier, Tier]:
    """Where a move reads and where it writes."""
    down = move.direction is Direction.D2H
    return (Tier.HBM, Tier.DRAM) if down else (Tier.DRAM, Tier.HBM)


class WatchedPool(PageAllocator):
    """Knows which pages are out; `on_give` sees what comes back before it is free."""

    def __init__(self, num_pages: int, on_give: Callable[[set[int]], None]) -> None:
        super().__init__(num_pages)
        self.out: set[int] = set()
        self._on_give = on_give

    def take(self, num_pages: int) -> Pages | None:
        pages = super().take(num_pages)
        if pages is not None:
            assert self.out.isdisjoint(pages.tolist())
            self.out.update(pages.tolist())
        return pages

    def give(self, pages: npt.ArrayLike) -> None:
        given = set(np.asarray(pages).tolist())
        self._on_give(given)
        super().give(pages)
        self.out -= given
