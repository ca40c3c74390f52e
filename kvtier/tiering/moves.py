"""Copies between the tiers as the tier manager orders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtier.ids import Direction
from kvtier.memory.pages import Pages
from kvtier.tree.node import Tier
from kvtier.tree.transfers import Transfer


class Why(StrEnum):
    """What a move is for; an engine gives it its priority by that."""

    LOAD = "load"
    """A request waits for its prefix."""
    ROOM = "room"
    """A request waits for the room that its pages leave."""
    RESERVE = "reserve"
    """Room ahead of need."""
    DEMOTE = "demote"
    """A program's idle KV goes down before anybody needs its room."""
    WRITE_THROUGH = "write through"
    """A finished request's KV goes down at once, and stays in HBM."""
    PREFETCH = "prefetch"
    """A program's KV comes up before its request does."""


@dataclass(eq=False, slots=True)
class Move:
    """A copy of pages from one tier to the other; `on_end(well)` callbacks run once it has ended.

    The pages of both tiers stay where they are until then, also where it is cancelled.
    """

    transfer: Transfer
    why: Why
    source_pages: Pages
    target_pages: Pages
    on_end: list[Callable[[bool], None]] = field(default_factory=list)

    @property
    def direction(self) -> Direction:
        """Down to DRAM or up to HBM."""
        return Direction.D2H if self.transfer.target is Tier.DRAM else Direction.H2D

    @property
    def num_pages(self) -> int:
        """Pages to copy."""
        return int(self.source_pages.size)


class Mover(Protocol):
    """Copies pages. It tells `TierManager.ended` of each move once, never from within `start`."""

    def start(self, move: Move) -> None:
        """Begin the copy; moves of one direction may end in any order."""
        ...

    def hasten(self, move: Move) -> None:
        """A request waits by now for a move that was ahead of need; it may have ended just now."""
        ...
