"""Moves under way, from the tree's copy to the mover's end."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import TieringError
from kvtier.memory.pages import Pages
from kvtier.tiering.counters import Counters
from kvtier.tiering.moves import Move, Mover, Why
from kvtier.tree.node import Node, Tier
from kvtier.tree.transfers import Transfer
from kvtier.tree.tree import RadixTree


class Traffic:
    """Starts moves, finds them by the nodes that they copy, and counts their ends."""

    def __init__(self, tree: RadixTree, mover: Mover, counters: Counters) -> None:
        self._tree = tree
        self._mover = mover
        self._counters = counters
        self._moves: dict[Transfer, Move] = {}
        self._unhurried: dict[Move, None] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def of(self, node: Node) -> Move | None:
        """The move that copies the node now."""
        return None if node.transfer is None else self._moves[node.transfer]

    def start(
        self,
        target: Tier,
        nodes: list[Node],
        pages: Pages,
        why: Why,
        on_end: Callable[[bool], None] | None = None,
    ) -> Move:
        """Copy whole nodes to `pages` of the target tier."""
        transfer = self._tree.copy_to(target, nodes, pages)
        move = Move(transfer, why, transfer.source_pages, transfer.target_pages)
        if on_end is not None:
            move.on_end.append(on_end)
        self._moves[transfer] = move
        if why in (Why.RESERVE, Why.DEMOTE):
            self._unhurried[move] = None
        self._mover.start(move)
        return move

    def hasten(self) -> None:
        """A request waits for room: what was to make some ahead of need is needed now."""
        while self._unhurried:
            move, _ = self._unhurried.popitem()
            self._mover.hasten(move)

    def end(self, move: Move, *, well: bool) -> Pages:
        """Pages of the target that nobody has now. Raises TieringError the second time."""
        if self._moves.pop(move.transfer, None) is not move:
            raise TieringError("this move has ended already; each ends once")
        self._unhurried.pop(move, None)
        self._count(move, well)
        return self._tree.finish(move.transfer, well=well)

    def _count(self, move: Move, well: bool) -> None:
        counters, pages = self._counters, move.num_pages
        if move.transfer.target is Tier.HBM:
            counters.loaded += pages * well
            counters.load_failed += pages * (not well)
        elif not well:
            counters.write_failed += pages
        elif move.why in (Why.DEMOTE, Why.WRITE_THROUGH):
            counters.demoted += pages
        else:
            counters.written_back += pages
