"""Room in both tiers: who waits for pages of HBM, and what has to go down or away for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from kvtier.ids import Label
from kvtier.memory.pages import PageAllocator, Pages
from kvtier.tiering.counters import Counters
from kvtier.tiering.moves import Move, Why
from kvtier.tiering.traffic import Traffic
from kvtier.tree.eviction import Evicted
from kvtier.tree.holders import label_of
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.tree import RadixTree


@dataclass(frozen=True, slots=True)
class TierMode:
    """What becomes of pages that leave HBM, and in which order they do."""

    offload: bool = True
    """DRAM takes what HBM has no room for."""
    write_through: bool = False
    """Pages are copied down when they are written (HiCache's default), never when they leave."""
    labels: bool = True
    """Eviction follows labels; INACTIVE pages are not worth a copy."""


@dataclass(eq=False, slots=True)
class Want:
    """Pages of HBM that were promised; `missing` are not there yet.

    Whoever finds some missing sets `on_room`, which runs once all are there.
    """

    missing: int
    on_room: Callable[[], None] | None = None
    pages: list[Pages] = field(default_factory=list)


class Room:
    """Free pages of both tiers, and how more become free.

    `ask` promises only what can be had: HBM's free pages and those that no request protects, less
    what is promised already. It waits for copies down, never for one another's promises, and where
    DRAM has no room either pages are dropped: so every promise is kept.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: dict[Tier, PageAllocator],
        mode: TierMode,
        counters: Counters,
        traffic: Traffic,
        reserve_pages: int,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._mode = mode
        self._counters = counters
        self._traffic = traffic
        self._reserve_pages = reserve_pages
        self._wants: deque[Want] = deque()
        self._coming = 0
        self._granted = 0  # since the reserve was looked at
        self._pumping = False
        self.promised = 0

    @property
    def available(self) -> int:
        """Pages of HBM that `ask` can still promise."""
        pages = self._tree.pages[Tier.HBM]
        return self._pools[Tier.HBM].num_free + pages.total - pages.pinned - self.promised

    @property
    def waiting(self) -> list[Want]:
        """Promises that are not kept yet, in order."""
        return list(self._wants)

    def ask(self, num_pages: int, *, first: bool = False) -> Want | None:
        """Promise pages, or None where they cannot be had. They may all be there at once.

        `first` of all that wait: for requests that run already.
        """
        if num_pages > self.available:
            return None
        want = Want(num_pages)
        self.promised += num_pages
        if first:
            self._wants.appendleft(want)
        else:
            self._wants.append(want)
        self.pump()
        return want

    def forget(self, want: Want) -> None:
        """The pages are not wanted any more: those that are there are free again."""
        if want in self._wants:
            self._wants.remove(want)
            self.promised -= want.missing
        for pages in want.pages:
            self.give(Tier.HBM, pages)
        want.pages.clear()
        self.pump()

    def give(self, tier: Tier, pages: Pages) -> None:
        """Pages that nobody uses any more."""
        self._pools[tier].give(pages)

    def pump(self) -> None:
        """Keep promises as far as there is room now, and start what makes more of it."""
        if self._pumping:
            return  # a callback of the loop below asked for more: the loop sees it
        self._pumping = True
        try:
            while self._wants and self._serve(self._wants[0]):
                want = self._wants.popleft()
                if want.on_room is not None:
                    want.on_room()
        finally:
            self._pumping = False
        if not self._wants:
            self._keep_reserve()

    def clear(self, num_pages: int) -> int:
        """Free pages of HBM after what needs no copy has left it for up to `num_pages` of them."""
        pool = self._pools[Tier.HBM]
        if pool.num_free < num_pages and not self._wants:
            self._evict_clean(num_pages - pool.num_free)
        return pool.num_free

    def dram(self, num_pages: int) -> Pages | None:
        """Pages of DRAM for a copy, other pages leaving for it; None, and nothing done, without."""
        pool = self._pools[Tier.DRAM]
        short = num_pages - pool.num_free
        if short > 0:
            evicted = self._tree.evict(Tier.DRAM, short)
            if evicted is None:
                return None
            self._take_back(evicted)
        return pool.take(num_pages)

    def expect(self, num_pages: int) -> None:
        """Pages of HBM are being copied down and will then be the first to leave."""
        self._coming += num_pages

    def written(self, move: Move, well: bool) -> None:
        """A copy of pages that were to leave HBM has ended."""
        self._coming -= move.num_pages
        if not well and self._wants and move.why is not Why.DEMOTE:
            # Trying again could go on for ever: what was to be copied, or its like, goes without.
            self._evict(min(move.num_pages, self._tree.pages[Tier.HBM].evictable))
        self.pump()

    def _serve(self, want: Want) -> bool:
        """Whether the want has all its pages now."""
        self._grant(want)
        if want.missing and self._coming:
            self._traffic.hasten()
        short = want.missing - self._coming
        if short > 0:
            self._make_room(short)
            self._grant(want)
        return not want.missing

    def _grant(self, want: Want) -> None:
        pool = self._pools[Tier.HBM]
        pages = pool.take(min(want.missing, pool.num_free))
        if pages is not None and pages.size:
            want.pages.append(pages)
            want.missing -= pages.size
            self.promised -= pages.size
            self._granted += pages.size

    def _make_room(self, num_pages: int) -> None:
        """Free pages of HBM, or begin to: in the tree's order, copying what is worth it.

        What needs no copy leaves at once. What is copied leaves when its copy has ended, unless
        it is in use again by then; then others leave.
        """
        left = num_pages - self._evict_clean(num_pages)
        while left > 0:
            dirty = list(takewhile(self._worth_a_copy, self._tree.first_to_leave(left)))
            if not dirty:
                return
            left -= self._copy_down(dirty, Why.ROOM)
            left -= self._evict_clean(left)

    def _evict_clean(self, num_pages: int) -> int:
        """Evict up to so many pages, as long as the next needs no copy; returns how many."""
        done = 0
        while done < num_pages:
            nodes = self._tree.first_to_leave(num_pages - done)
            clean = list(takewhile(lambda node: not self._worth_a_copy(node), nodes))
            if not clean:
                break
            done += self._evict(sum(map(self._tree.num_pages, clean)))
        return done

    def _keep_reserve(self) -> None:
        """Copy down what leaves next, so that the next request need not wait for it."""
        free = self._pools[Tier.HBM].num_free + self._coming
        half = self._reserve_pages / 2
        if free >= half or self._granted < half:  # looking has its price: once per half a reserve
            return
        self._granted = 0
        nodes = self._tree.first_to_leave(self._reserve_pages)
        dirty = [node for node in nodes if self._worth_a_copy(node)]
        if dirty and sum(map(self._tree.num_pages, dirty)) <= self._dram_room:
            self._copy_down(dirty, Why.RESERVE)

    @property
    def _dram_room(self) -> int:
        return self._pools[Tier.DRAM].num_free + self._tree.pages[Tier.DRAM].evictable

    def _copy_down(self, nodes: list[Node], why: Why) -> int:
        """Begin to copy the nodes; returns the pages that leave HBM by it, or have left.

        Where DRAM has no room for all, those that leave first are dropped, and that is all.
        """
        count = sum(map(self._tree.num_pages, nodes))
        if count > self._dram_room:
            return self._evict(count - self._dram_room)
        target = self.dram(count)
        assert target is not None
        if any(node.dead for node in nodes):  # lost with a page of DRAM that they came after
            self.give(Tier.DRAM, target)
            return 0
        self.expect(count)
        self._traffic.start(Tier.DRAM, nodes, target, why)
        return count

    def _worth_a_copy(self, node: Node) -> bool:
        mode = self._mode
        if not mode.offload or mode.write_through or node.states[Tier.DRAM] is not State.ABSENT:
            return False
        return not mode.labels or label_of(node) is not Label.INACTIVE

    def _evict(self, num_pages: int) -> int:
        evicted = self._tree.evict(Tier.HBM, num_pages)
        assert evicted is not None, "pages that may leave HBM cannot"
        self._take_back(evicted)
        return num_pages

    def _take_back(self, evicted: Evicted) -> None:
        self._counters.dropped += evicted.lost
        for tier in Tier:
            self.give(tier, evicted.ids(tier))
