"""What one worker's two pools hold, in KV tokens: prefixes of programs, and shared heads.

A program's copy is its private prefix [0, hbm) in HBM and [low, high) of it in DRAM. Contents
are prefixes, so eviction trims tails. A running program is locked; the rest is cached and
evictable. What a compaction leaves behind becomes a copy of its own without an owner.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtier.ids import Label
from kvtier.sim.copies import CacheCounters, CacheMode, Copy, Head, Hit, Shelf

_HBM_ORDER = (Label.INACTIVE, Label.IDLE, Label.BUSY)
_DRAM_ORDER = (Label.INACTIVE, Label.BUSY, Label.IDLE)


class TierCache:
    """Both pools of one worker.

    Tokens of HBM: free + evictable + locked = capacity, where `growing` counts what running
    requests have produced since they were admitted. All or nothing: `take` frees enough or
    changes nothing.
    """

    def __init__(self, hbm_tokens: int, dram_tokens: int, mode: CacheMode, page_size: int) -> None:
        self.capacity = hbm_tokens
        self.dram_capacity = dram_tokens if mode.offload else 0
        self.mode = mode
        self.page_size = page_size
        self.free = hbm_tokens
        self.dram_free = self.dram_capacity
        self.growing = 0
        self.counters = CacheCounters()
        self.copies: dict[str, Copy] = {}
        self._heads: dict[str, Head] = {}
        self._idle_heads: OrderedDict[int, Head] = OrderedDict()
        self._idle_head_tokens = 0
        self._idle_dram_heads: OrderedDict[int, Head] = OrderedDict()
        self._now = 0
        self._hbm = Shelf(_HBM_ORDER)
        self._sole = Shelf(_DRAM_ORDER)
        self._double = Shelf(_DRAM_ORDER)
        self._ownerless: set[Copy] = set()

    @property
    def room(self) -> int:
        """Tokens of HBM that `take` can give: free and evictable."""
        return self.free + self._hbm.tokens + self._idle_head_tokens

    @property
    def locked(self) -> int:
        """Tokens of HBM that running requests hold."""
        return self.capacity - self.room

    def copy_of(self, program: str, group: str | None) -> Copy:
        """The program's copy, made empty when there is none."""
        copy = self.copies.get(program)
        if copy is None:
            head = None
            if group is not None:
                head = self._heads.setdefault(group, Head())
            copy = Copy(program, head, self._next(), self._now)
            self.copies[program] = copy
        return copy

    def _next(self) -> int:
        self._now += 1
        return self._now

    # Match, lock, unlock -------------------------------------------------------------------

    def match(self, copy: Copy, head_tokens: int, private_tokens: int) -> Hit:
        """What of a prompt that reuses `head_tokens` + `private_tokens` is here; locks it.

        Private content beyond the reused prefix is a dead branch and loses its owner.
        """
        self._cut(copy, private_tokens)
        head = copy.head
        hit = Hit(0, 0)
        if head is not None and head_tokens:
            hit.hbm_tokens = min(head_tokens, head.hbm_tokens)
            hit.dram_tokens = max(min(head_tokens, head.dram_tokens) - hit.hbm_tokens, 0)
            self._lock_head(head, head_tokens, 1)
        self._set(copy, locked=True, reading=True)
        kept = copy.kept_tokens // self.page_size * self.page_size
        if hit.hbm_tokens + hit.dram_tokens < head_tokens:
            kept = 0
        hit.hbm_tokens += min(copy.hbm, kept)
        hit.dram_tokens += max(kept - copy.hbm, 0)
        return hit

    def release(self, copy: Copy, head_tokens: int, grown: int) -> None:
        """The request ended: what it produced joins the copy, and all of it may be evicted."""
        self.growing -= grown
        self._set(copy, hbm=copy.hbm + grown, locked=False)
        copy.used = self._next()
        for shelf in (self._hbm, self._sole, self._double):
            shelf.touch(copy)
        if copy.head is not None and head_tokens:
            self._lock_head(copy.head, head_tokens, -1)
        if copy.doomed:
            self._free(copy)

    def unmatch(self, copy: Copy, head_tokens: int) -> None:
        """Undo `match` for a request that is not admitted."""
        self._set(copy, locked=False, reading=False)
        if copy.head is not None and head_tokens:
            self._lock_head(copy.head, head_tokens, -1)
        self._forget_empty(copy)

    def forget_tail(self, copy: Copy, private_tokens: int) -> None:
        """Give back the room of a locked prompt that was not computed beyond `private_tokens`."""
        self.free += copy.hbm - private_tokens
        self._set(copy, hbm=private_tokens)

    def loaded(self, copy: Copy) -> None:
        """The load that `match` promised is complete; its source may be reclaimed."""
        self._set(copy, reading=False)

    def fill(self, copy: Copy, hit: Hit, head_tokens: int, private_tokens: int) -> None:
        """Extend a locked copy to the whole prompt; its room must have been taken."""
        head = copy.head
        if head is not None and head_tokens > head.hbm_tokens:
            head.hbm_tokens = head_tokens
            self._shelve_head(head)
            more = head_tokens - head.dram_tokens
            if self.mode.offload and 0 < more <= self.dram_free:
                head.dram_tokens = head_tokens
                self.dram_free -= more
        self.counters.loaded += hit.dram_tokens
        self._set(copy, hbm=private_tokens)

    def missing(self, copy: Copy, head_tokens: int, private_tokens: int) -> int:
        """HBM tokens that a matched prompt still needs."""
        head_there = copy.head.hbm_tokens if copy.head is not None else head_tokens
        return private_tokens - copy.hbm + max(head_tokens - head_there, 0)

    def _lock_head(self, head: Head, tokens: int, change: int) -> None:
        """One running request more, or fewer, uses this much of the head."""
        head.locks[tokens] += change
        if not head.locks[tokens]:
            del head.locks[tokens]
        self._shelve_head(head)

    def _shelve_head(self, head: Head) -> None:
        # Copies on a part that nobody has locked are unlocked, too: they go first, then it can go.
        idle = max(head.hbm_tokens - max(head.locks, default=0), 0)
        self._idle_head_tokens += idle - head.idle_tokens
        head.idle_tokens = idle
        if idle:
            self._idle_heads.setdefault(id(head), head)
        else:
            self._idle_heads.pop(id(head), None)
        # A head in DRAM is needed while a copy in DRAM stands on it.
        spare = head.dram_tokens > 0 and not head.locks and not head.num_dram_children
        if spare:
            self._idle_dram_heads.setdefault(id(head), head)
        else:
            self._idle_dram_heads.pop(id(head), None)

    # Room ----------------------------------------------------------------------------------

    def take(self, tokens: int) -> int | None:
        """Make `tokens` of HBM the caller's; how many were written back, or None if refused."""
        if tokens > self.room:
            return None
        before = self.counters.written_back
        while self.free < tokens:
            self._evict_one(tokens - self.free)
        self.free -= tokens
        return self.counters.written_back - before

    def grow(self, tokens: int) -> int:
        """Room for tokens that running requests produce; written-back tokens are returned."""
        written = self.take(tokens)
        assert written is not None, f"{tokens} tokens to grow, {self.room} there"
        self.growing += tokens
        return written

    def shrink(self, tokens: int) -> None:
        """Give back room that `grow` took and nothing used."""
        self.growing -= tokens
        self.free += tokens

    def _evict_one(self, tokens: int) -> None:
        for label in self._hbm.labels():
            copy = self._hbm.first(label)
            if copy is not None:
                self._trim_hbm(copy, min(tokens, copy.evictable))
                return
        assert self._idle_heads, f"{tokens} tokens of HBM promised, nothing is evictable"
        head = next(iter(self._idle_heads.values()))
        self.free += head.idle_tokens
        head.hbm_tokens -= head.idle_tokens
        self._shelve_head(head)

    def _trim_hbm(self, copy: Copy, tokens: int) -> None:
        """Evict the tail of a copy; what DRAM lacks is written back where the mode says so."""
        keep, low, high, written = copy.hbm - tokens, copy.low, copy.high, 0
        if self.mode.offload and not self.mode.write_through and copy.label is not Label.INACTIVE:
            there = max(min(high, copy.hbm) - max(low, keep), 0)
            low, high = self._wanted(copy, keep)
            if self._clear_dram(high - low - (copy.high - copy.low), copy):
                written = tokens - there
            else:
                low, high = copy.low, copy.high
        if low > keep:
            low = high = keep  # HBM no longer reaches what DRAM has
        self.counters.written_back += written
        self.counters.dropped += copy.stored_tokens - keep - max(high - max(low, keep), 0)
        self.free += tokens
        self._set(copy, hbm=keep, low=low, high=high)
        self._forget_empty(copy)

    @staticmethod
    def _wanted(copy: Copy, keep: int) -> tuple[int, int]:
        """The DRAM interval after [keep, hbm) has gone down."""
        if copy.high <= copy.low or copy.high < keep:
            return keep, copy.hbm
        return min(copy.low, keep), max(copy.high, copy.hbm)

    # DRAM ----------------------------------------------------------------------------------

    def back_up(self, copy: Copy) -> int:
        """Copy what DRAM lacks of the HBM prefix down; returns its tokens, 0 without room."""
        low, high = (copy.low, copy.high) if copy.high > copy.low else (0, 0)
        new = max(copy.hbm, high) - (high - low)
        if new <= 0 or not self.mode.offload or not self._clear_dram(new, copy):
            return 0
        if copy.high <= copy.low or copy.low > 0:
            low = 0
        self._set(copy, low=low, high=max(high, copy.hbm))
        self.counters.backed_up += new
        return new

    def _clear_dram(self, tokens: int, spared: Copy) -> bool:
        """Free DRAM for `tokens`, never from `spared`; False with nothing changed otherwise.

        Order (design: residency): INACTIVE, then duplicates of what HBM has, then BUSY sole
        copies, then IDLE ones. Without labels all are BUSY: write-back reclaims duplicates first,
        write-through never does.
        """
        was_reading = spared.reading
        self._set(spared, reading=True)
        doubles = 0 if self.mode.write_through else self._double.tokens
        heads = sum(head.dram_tokens for head in self._idle_dram_heads.values())
        enough = self.dram_free + heads + doubles + self._sole.tokens >= tokens
        if enough:
            self._trim_heads(tokens)
            self._trim_sole(Label.INACTIVE, tokens)
            if doubles:
                self._trim_doubles(tokens)
            self._trim_sole(Label.BUSY, tokens)
            self._trim_sole(Label.IDLE, tokens)
            assert self.dram_free >= tokens, f"{self.dram_free} of DRAM free, {tokens} promised"
        self._set(spared, reading=was_reading)
        return enough

    def _trim_heads(self, tokens: int) -> None:
        while self.dram_free < tokens and self._idle_dram_heads:
            _, head = self._idle_dram_heads.popitem(last=False)
            self.dram_free += head.dram_tokens
            head.dram_tokens = 0

    def _trim_sole(self, label: Label, tokens: int) -> None:
        while self.dram_free < tokens:
            copy = self._sole.first(label)
            if copy is None:
                return
            cut = min(copy.sole, tokens - self.dram_free)
            self.counters.dropped += cut
            self._set(copy, high=copy.high - cut)
            self._forget_empty(copy)

    def _trim_doubles(self, tokens: int) -> None:
        for label in _DRAM_ORDER:
            while self.dram_free < tokens:
                copy = self._double.first(label)
                if copy is None:
                    break
                # What lies beyond HBM stays usable: [hbm, high).
                self._set(copy, low=min(copy.hbm, copy.high))

    # Owners --------------------------------------------------------------------------------

    def relabel(self, copy: Copy, label: Label) -> None:
        """Change the copy's eviction class in both tiers."""
        for shelf in (self._hbm, self._sole, self._double):
            shelf.move(copy, label)
        copy.label = label

    def drop(self, program: str) -> None:
        """Free the program's KV in both tiers; a locked copy is freed when it is released."""
        copy = self.copies.get(program)
        if copy is None:
            return
        if copy.locked:
            copy.doomed = True
        else:
            self._free(copy)

    def _free(self, copy: Copy) -> None:
        copy.doomed = False
        self.free += copy.hbm
        self._set(copy, hbm=0, low=0, high=0)
        self._forget_empty(copy)

    def _cut(self, copy: Copy, private_tokens: int) -> None:
        """Split off what lies beyond the reused prefix."""
        hbm, low, high = copy.hbm, copy.low, copy.high
        if max(hbm, high) <= private_tokens:
            return
        label = Label.INACTIVE if self.mode.labels else copy.label
        dead = Copy(None, copy.head, self._next(), copy.used, label)
        at = private_tokens
        self._set(copy, hbm=min(hbm, at), low=min(low, at), high=min(high, at))
        self._ownerless.add(dead)
        self._set(dead, hbm=max(hbm - at, 0), low=max(low - at, 0), high=max(high - at, 0))
        self._forget_empty(dead)

    def _forget_empty(self, copy: Copy) -> None:
        if copy.hbm or copy.high > copy.low or copy.locked:
            return
        if copy.program is None:
            self._ownerless.discard(copy)
        elif self.copies.get(copy.program) is copy:
            del self.copies[copy.program]

    def _set(
        self,
        copy: Copy,
        *,
        hbm: int | None = None,
        low: int | None = None,
        high: int | None = None,
        locked: bool | None = None,
        reading: bool | None = None,
    ) -> None:
        """Change a copy and every sum and order that depends on it."""
        had_dram = copy.high > copy.low
        before = copy.high - copy.low
        copy.hbm = copy.hbm if hbm is None else hbm
        copy.low = copy.low if low is None else low
        copy.high = copy.high if high is None else high
        copy.locked = copy.locked if locked is None else locked
        copy.reading = copy.reading if reading is None else reading
        self.dram_free -= (copy.high - copy.low) - before
        evictable = 0 if copy.locked else copy.hbm
        sole = 0 if copy.reading else max(copy.high - max(copy.low, copy.hbm), 0)
        double = 0 if copy.reading else copy.high - copy.low - sole
        self._hbm.put(copy, copy.evictable, evictable)
        self._sole.put(copy, copy.sole, sole)
        self._double.put(copy, copy.double, double)
        copy.evictable, copy.sole, copy.double = evictable, sole, double
        head, has_dram = copy.head, copy.high > copy.low
        if head is not None and has_dram != had_dram:
            head.num_dram_children += 1 if has_dram else -1
            self._shelve_head(head)

    def check_integrity(self) -> None:
        """Sums over all copies equal the running counters, and both pools add up."""
        copies = [*self.copies.values(), *self._ownerless]
        heads = self._heads.values()
        held = sum(c.hbm for c in copies) + sum(h.hbm_tokens for h in heads)
        assert self.free + held + self.growing == self.capacity, (
            f"HBM: {self.free} free + {held} held + {self.growing} growing != {self.capacity}"
        )
        dram = sum(c.high - c.low for c in copies) + sum(h.dram_tokens for h in heads)
        assert self.dram_free + dram == self.dram_capacity, (
            f"DRAM: {self.dram_free} free + {dram} held != {self.dram_capacity}"
        )
        assert self._hbm.tokens == sum(c.hbm for c in copies if not c.locked), "evictable sum"
        assert min(self.free, self.dram_free, self.growing) >= 0, "a pool is overdrawn"
