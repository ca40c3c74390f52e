"""Copies of programs' KV, shared heads, and the orders in which copies lose tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.scheduling.commands import Label

GroupKey = tuple[str, int]


@dataclass(slots=True, eq=False)
class Head:
    """Tools and system text that the programs of one group share."""

    tokens: int
    in_hbm: bool = False
    in_dram: bool = False
    num_locks: int = 0
    num_hbm_children: int = 0
    num_dram_children: int = 0


@dataclass(slots=True, eq=False)
class Copy:
    """One program's private KV on this worker. `label` orders eviction where labels are used."""

    program: str | None
    head: Head | None
    label: Label = Label.BUSY
    hbm: int = 0
    low: int = 0
    high: int = 0
    locked: bool = False
    doomed: bool = False
    """Its owner is gone: freed when it is released."""
    reading: bool = False
    """DRAM pages are the source of a running load: they stay where they are."""
    evictable: int = 0
    sole: int = 0
    double: int = 0

    @property
    def kept_tokens(self) -> int:
        """Length of the prefix that can be used again without computing it."""
        return max(self.hbm, self.high) if self.low <= self.hbm else self.hbm


class Shelf:
    """Copies in the order in which they lose tokens: by label rank, then least recent first."""

    __slots__ = ("_rows", "tokens")

    def __init__(self, order: tuple[Label, ...]) -> None:
        self._rows: dict[Label, OrderedDict[int, Copy]] = {label: OrderedDict() for label in order}
        self.tokens = 0

    def put(self, copy: Copy, old: int, new: int) -> None:
        """The copy has `new` tokens here instead of `old`."""
        if old == new:
            return
        self.tokens += new - old
        row = self._rows[copy.label]
        if new > 0:
            row.setdefault(id(copy), copy)
        else:
            row.pop(id(copy), None)

    def move(self, copy: Copy, label: Label) -> None:
        """The copy's label is about to become `label`."""
        if self._rows[copy.label].pop(id(copy), None) is not None:
            self._rows[label][id(copy)] = copy

    def touch(self, copy: Copy) -> None:
        """The copy is the most recent of its class."""
        row = self._rows[copy.label]
        if id(copy) in row:
            row.move_to_end(id(copy))

    def first(self, label: Label) -> Copy | None:
        """The copy of this class that loses tokens first."""
        return next(iter(self._rows[label].values()), None)

    def labels(self) -> Iterator[Label]:
        return iter(self._rows)
