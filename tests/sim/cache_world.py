"""A TierCache driven as an engine drives it, beside plain sets of token positions.

Each operation takes a picture before and after, and checks what the texts promise about the
difference: nobody locked loses HBM, no source of a load loses DRAM, classes lose tokens in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.ids import Label
from kvtier.sim.cache import TierCache
from kvtier.sim.copies import CacheMode, Copy, Head

Group = tuple[str, int]
"""A group's name, and how much of its head a program uses."""

NO_OFFLOAD = CacheMode(offload=False, write_through=False, labels=False)
WRITE_THROUGH = CacheMode(offload=True, write_through=True, labels=False)
WRITE_BACK = CacheMode(offload=True, write_through=False, labels=False)
LABELS = CacheMode(offload=True, write_through=False, labels=True)
MODES = {
    "no-offload": NO_OFFLOAD,
    "write-through": WRITE_THROUGH,
    "write-back": WRITE_BACK,
    "labels": LABELS,
}
HBM_RANK = {Label.INACTIVE: 0, Label.IDLE: 1, Label.BUSY: 2}


@dataclass
class Life:
    """What the model knows of a program. `computed` counts its private tokens that exist."""

    program: str
    group: Group | None = None
    computed: int = 0
    used: int = 0
    running: bool = False
    loading: bool = False
    grown: int = 0
    head_tokens: int = 0


@dataclass(frozen=True)
class Place:
    """Where one copy's tokens are, as sets of positions, and what may be done to it."""

    hbm: frozenset[int]
    dram: frozenset[int]
    label: Label
    locked: bool
    reading: bool

    @property
    def sole(self) -> int:
        return 0 if self.reading else len(self.dram - self.hbm)

    @property
    def double(self) -> int:
        return 0 if self.reading else len(self.dram & self.hbm)


@dataclass(frozen=True)
class Picture:
    places: dict[Copy, Place]
    free: int
    dram_free: int
    dropped: int
    written_back: int

    @property
    def evictable(self) -> int:
        return sum(len(p.hbm) for p in self.places.values() if not p.locked)


@dataclass
class CacheWorld:
    cache: TierCache
    strict_recency: bool = False
    lives: dict[str, Life] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    clock: int = 0

    # Pictures ------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """All copies, dead branches included."""
        return [*self.cache.copies.values(), *self.cache._ownerless]

    def picture(self) -> Picture:
        cache = self.cache
        places = {
            c: Place(
                frozenset(range(c.hbm)),
                frozenset(range(c.low, c.high)),
                c.label,
                c.locked,
                c.reading,
            )
            for c in self.copies()
        }
        counters = cache.counters
        return Picture(places, cache.free, cache.dram_free, counters.dropped, counters.written_back)

    def free_head_tokens(self) -> int:
        """Heads that no running request stands on: evictable, once their copies have gone."""
        return sum(max(h.hbm_tokens - max(h.locks, default=0), 0) for h in self.heads.values())

    def spare_head_tokens(self, before: Picture) -> int:
        """Heads in DRAM that neither a running request nor a copy in DRAM stands on."""
        needed = {id(c.head) for c, place in before.places.items() if place.dram}
        heads = [h for h in self.heads.values() if not h.locks and id(h) not in needed]
        return sum(h.dram_tokens for h in heads)

    def recency(self, copy: Copy) -> int | None:
        """When the copy's program last ran; None for a dead branch."""
        return self.lives[copy.program].used if copy.program is not None else None

    # Operations ----------------------------------------------------------------------------

    def life(self, program: str, group: Group | None = None) -> Life:
        return self.lives.setdefault(program, Life(program, group))

    def ask(self, program: str, reused: int, new: int, group: Group | None = None) -> bool:
        """Match, make room, fill: what admission does. False when room was refused."""
        life = self.life(program, group)
        before = self.picture()
        name, head_tokens = life.group if life.group is not None else (None, 0)
        copy = self.cache.copy_of(program, name)
        if copy.head is not None and name is not None:
            self.heads[name] = copy.head
        expected = self._expected_hit(copy, head_tokens, reused)
        hit = self.cache.match(copy, head_tokens, reused)
        assert (hit.hbm_tokens + hit.dram_tokens, hit.hbm_tokens) == expected
        need = self.cache.missing(copy, head_tokens, reused + new)
        life.computed = min(life.computed, reused)
        self._check_kept_safe(before, self.picture(), {copy})
        if not self.take(need):
            self.cache.unmatch(copy, head_tokens)
            return False
        loaded = self.cache.counters.loaded
        self.cache.fill(copy, hit, head_tokens, reused + new)
        assert self.cache.counters.loaded - loaded == hit.dram_tokens
        assert copy.hbm == reused + new
        life.computed = reused + new
        life.running = life.loading = True
        life.head_tokens = head_tokens
        self.check()
        return True

    def _expected_hit(self, copy: Copy, head_tokens: int, reused: int) -> tuple[int, int]:
        """(all tokens, those in HBM) of the longest prefix that is somewhere, in whole pages."""
        in_hbm = in_dram = 0
        if copy.head is not None:
            in_hbm = min(head_tokens, copy.head.hbm_tokens)
            in_dram = max(min(head_tokens, copy.head.dram_tokens) - in_hbm, 0)
        if in_hbm + in_dram < head_tokens:
            return in_hbm + in_dram, in_hbm
        somewhere = set(range(copy.hbm)) | set(range(copy.low, copy.high))
        length = 0
        while length < reused and length in somewhere:
            length += 1
        length -= length % self.cache.page_size
        return in_hbm + in_dram + length, in_hbm + min(length, copy.hbm)

    def take(self, tokens: int) -> bool:
        """`take`, checked: all or nothing, no more than needed, in order. Keeps the tokens."""
        before = self.picture()
        heads = self.free_head_tokens()
        room = before.free + before.evictable + heads
        assert self.cache.room == room
        written = self.cache.take(tokens)
        after = self.picture()
        if tokens > room:
            assert written is None
            assert after == before, "a refused take changed something"
            return False
        assert written == after.written_back - before.written_back
        self._check_take(before, after, tokens, heads)
        return True

    def _check_take(self, before: Picture, after: Picture, tokens: int, heads: int) -> None:
        lost = sum(
            len(p.hbm) - len(after.places[c].hbm if c in after.places else ())
            for c, p in before.places.items()
        )
        short = max(tokens - before.free, 0)
        assert lost <= short, f"{lost} tokens evicted where {short} were short"
        assert lost == short or heads, "HBM tokens came from nowhere"
        self._check_hbm_order(before, after)
        self._check_kept_safe(before, after, set())
        self._check_accounts(before, after)

    def release(self, program: str) -> None:
        life, copy = self.lives[program], self.cache.copies[program]
        self.clock += 1
        life.used = self.clock
        if life.loading:
            self.cache.loaded(copy)
        self.cache.release(copy, life.head_tokens, life.grown)
        life.computed += life.grown
        life.running = life.loading = False
        life.grown = 0
        self.check()

    def loaded(self, program: str) -> None:
        self.cache.loaded(self.cache.copies[program])
        self.lives[program].loading = False
        self.check()

    def back_up(self, program: str) -> int:
        copy, before = self.cache.copies[program], self.picture()
        place = before.places[copy]
        wanted = place.hbm | place.dram
        new = len(wanted - place.dram)
        free = before.dram_free + sum(
            p.sole + (0 if self.cache.mode.write_through else p.double)
            for c, p in before.places.items()
            if c is not copy
        )
        free += self.spare_head_tokens(before)
        tokens = self.cache.back_up(copy)
        after = self.picture()
        fits = self.cache.mode.offload and new <= free
        assert tokens == (new if fits else 0)
        if tokens:
            assert after.places[copy].dram == wanted
            self._check_dram_order(before, after, copy)
        else:
            assert after == before, "a backup that failed changed something"
        self._check_kept_safe(before, after, set())
        self._check_accounts(before, after)
        self.check()
        return tokens

    # Checks --------------------------------------------------------------------------------

    def _check_hbm_order(self, before: Picture, after: Picture) -> None:
        """Who lost HBM tokens, lost them after all that go before it had nothing left."""
        losers = []
        for copy, place in before.places.items():
            left = len(after.places[copy].hbm) if copy in after.places else 0
            if left < len(place.hbm):
                assert not place.locked, f"{copy} is locked and lost HBM"
                losers.append(copy)
        left_over = [
            c for c, p in before.places.items() if not p.locked and c in after.places and c.hbm
        ]
        for loser in losers:
            for other in left_over:
                if other is loser:
                    continue
                ranks = HBM_RANK[before.places[other].label], HBM_RANK[before.places[loser].label]
                assert ranks[0] >= ranks[1], f"{loser} lost HBM before {other}"
                recent = self.recency(other), self.recency(loser)
                if self.strict_recency and ranks[0] == ranks[1] and None not in recent:
                    assert recent[0] >= recent[1], f"{loser} lost HBM before the older {other}"

    def _check_dram_order(self, before: Picture, after: Picture, spared: Copy) -> None:
        """DRAM INACTIVE, then duplicates, then BUSY sole copies, then IDLE ones; LRU inside."""
        lost: list[tuple[int, Copy]] = []
        left: list[tuple[int, Copy]] = []
        for copy, place in before.places.items():
            if copy is spared or place.reading:
                continue
            now = after.places.get(copy, Place(place.hbm, frozenset(), place.label, False, False))
            sole = {Label.INACTIVE: 0, Label.BUSY: 2, Label.IDLE: 3}[place.label]
            gone = place.dram - now.dram
            lost += [(sole, copy)] * bool(gone - place.hbm)
            lost += [(1 if sole else 0, copy)] * bool(gone & place.hbm)
            left += [(sole, copy)] * bool(now.dram - place.hbm)
            if not self.cache.mode.write_through and sole:
                left += [(1, copy)] * bool(now.dram & place.hbm)
        for rank, loser in lost:
            for other_rank, other in left:
                assert other_rank >= rank, f"{loser} lost DRAM ({rank}) before {other}"
                recent = self.recency(other), self.recency(loser)
                if self.strict_recency and other_rank == rank and None not in recent:
                    assert recent[0] >= recent[1], f"{loser} lost DRAM before the older {other}"

    def _check_kept_safe(self, before: Picture, after: Picture, cut: set[Copy]) -> None:
        """Locks and sources hold; write-through keeps every duplicate of what HBM has."""
        for copy, place in before.places.items():
            now = after.places.get(copy)
            if place.locked:
                assert now is not None
                assert now.hbm >= place.hbm, f"{copy} is locked and lost HBM"
            if place.reading and copy not in cut:
                assert now is not None
                assert now.dram == place.dram, f"{copy} is read and its DRAM changed"
            if self.cache.mode.write_through and now is not None and copy not in cut:
                assert now.dram >= place.dram & now.hbm, f"{copy} lost a duplicate"

    @staticmethod
    def _check_accounts(before: Picture, after: Picture) -> None:
        """What is in neither tier any more was dropped, and is counted."""
        lost = 0
        for copy, place in before.places.items():
            now = after.places.get(copy)
            kept = now.hbm | now.dram if now is not None else frozenset()
            lost += len((place.hbm | place.dram) - kept)
        assert after.dropped - before.dropped == lost

    def check(self) -> None:
        """Law 1 from outside, and nothing is kept that was never computed."""
        cache = self.cache
        cache.check_integrity()
        heads = list(self.heads.values())
        held = sum(c.hbm for c in self.copies()) + sum(h.hbm_tokens for h in heads)
        assert cache.free + held + cache.growing == cache.capacity
        assert cache.growing >= sum(life.grown for life in self.lives.values())
        kept = sum(c.high - c.low for c in self.copies())
        kept += sum(h.dram_tokens for h in heads)
        assert cache.dram_free + kept == cache.dram_capacity
        assert min(cache.free, cache.dram_free, cache.room, cache.locked) >= 0
        for life in self.lives.values():
            copy = cache.copies.get(life.program)
            if copy is None:
                assert not life.running
                continue
            assert max(copy.hbm, copy.high, copy.kept_tokens) <= life.computed
            assert 0 <= copy.low <= copy.high
            assert copy.low <= copy.hbm or copy.low == copy.high, f"{copy}: DRAM out of reach"
            if not life.running:
                contiguous = set(range(copy.hbm)) | set(range(copy.low, copy.high))
                assert contiguous >= set(range(copy.kept_tokens)), f"{copy} has a hole"
