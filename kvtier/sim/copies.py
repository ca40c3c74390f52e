"""Copies of programs' KV, shared heads, and the orders in which copies lose tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvtier.ids import Label


@dataclass(slots=True, eq=False)
class Head:
    """Tools and system text that the programs of one group share, as far as each tier has it."""

    hbm_tokens: int = 0
    dram_tokens: int = 0
    locks: Counter[int] = field(default_factory=Counter)
    """How many running requests use how much of it."""
    idle_tokens: int = 0
    """The part in HBM that no running request uses; cache.py keeps it."""
    num_dram_children: int = 0


@dataclass(slots=True, eq=False)
class Copy:
    """One program's private KV on this worker. `label` orders eviction where labels are used."""

    program: str | None
    head: Head | None
    serial: int
    """Its number among all copies: breaks ties of age."""
    used: int = 0
    """When it was last used, in uses of the whole cache."""
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
    def stored_tokens(self) -> int:
        """Distinct tokens that either tier has, reachable or not."""
        return self.hbm + max(self.high - max(self.low, self.hbm), 0)

    @property
    def kept_tokens(self) -> int:
        """Length of the prefix that can be used again without computing it."""
        return max(self.hbm, self.high) if self.low <= self.hbm else self.hbm


@dataclass(frozen=True, slots=True)
class CacheMode:
    """How the engine's cache behaves; see PolicySpec."""

    offload: bool
    write_through: bool
    labels: bool


@dataclass(slots=True)
class Hit:
    """What a prompt finds: tokens in HBM, and tokens to load from DRAM."""

    hbm_tokens: int
    dram_tokens: int


@dataclass(slots=True)
class CacheCounters:
    """Totals in tokens; what went down a tier or was lost."""

    written_back: int = 0
    backed_up: int = 0
    loaded: int = 0
    dropped: int = 0


class Shelf:
    """Copies in the order in which they lose tokens: by label rank, then least recently used.

    A heap per label, with entries that go stale when a copy is used again or leaves.
    """

    __slots__ = ("_heaps", "_rows", "tokens")

    def __init__(self, order: tuple[Label, ...]) -> None:
        self._rows: dict[Label, dict[int, Copy]] = {label: {} for label in order}
        self._heaps: dict[Label, list[tuple[int, int]]] = {label: [] for label in order}
        self.tokens = 0

    def put(self, copy: Copy, old: int, new: int) -> None:
        """The copy has `new` tokens here instead of `old`."""
        if old == new:
            return
        self.tokens += new - old
        if not old:
            self._add(copy, copy.label)
        elif not new:
            del self._rows[copy.label][copy.serial]

    def _add(self, copy: Copy, label: Label) -> None:
        self._rows[label][copy.serial] = copy
        heappush(self._heaps[label], (copy.used, copy.serial))

    def move(self, copy: Copy, label: Label) -> None:
        """The copy's label is about to become `label`; its age stays."""
        if self._rows[copy.label].pop(copy.serial, None) is not None:
            self._add(copy, label)

    def touch(self, copy: Copy) -> None:
        """The copy has just been used."""
        if copy.serial in self._rows[copy.label]:
            heappush(self._heaps[copy.label], (copy.used, copy.serial))

    def first(self, label: Label) -> Copy | None:
        """The copy of this class that loses tokens first."""
        row, heap = self._rows[label], self._heaps[label]
        while heap:
            used, serial = heap[0]
            copy = row.get(serial)
            if copy is not None and copy.used == used:
                return copy
            heappop(heap)
        return None

    def labels(self) -> Iterator[Label]:
        return iter(self._rows)
