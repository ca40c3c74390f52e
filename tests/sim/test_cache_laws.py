"""Random lives of copies in every cache mode: the laws of both pools hold after each step."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.ids import Label
from kvtier.sim.cache import TierCache
from kvtier.sim.copies import CacheMode

from .cache_world import MODES, CacheWorld

# Without the phase that explains a failure: it takes longer than finding one.
SETTINGS = settings(
    stateful_step_count=40, phases=(Phase.reuse, Phase.generate, Phase.shrink), deadline=None
)
INDEX = st.integers(0, 6)
TOKENS = st.integers(0, 60)
SHARE = st.integers(0, 100)
GROUPS = (None, ("tools", 20), ("other", 7), ("tools", 12))


class Machine(RuleBasedStateMachine):
    """Programs p0..p6 over two tiny pools; some share a head, of which they use more or less."""

    mode: CacheMode
    strict: bool

    def __init__(self) -> None:
        super().__init__()
        self.world = CacheWorld(TierCache(1, 0, self.mode, 1))

    @initialize(hbm=st.integers(40, 200), dram=st.integers(0, 200), page=st.sampled_from([1, 16]))
    def open(self, hbm: int, dram: int, page: int) -> None:
        self.world = CacheWorld(TierCache(hbm, dram, self.mode, page), self.strict)

    def _pick(self, index: int, *, running: bool) -> str | None:
        names = [
            name
            for name, life in self.world.lives.items()
            if life.running is running and name in self.world.cache.copies
        ]
        return names[index % len(names)] if names else None

    @rule(index=INDEX, share=st.one_of(st.just(100), SHARE), new=TOKENS)
    def ask(self, index: int, share: int, new: int) -> None:
        """A program that does not run asks: reuses a share of what it has, adds new tokens."""
        name = f"p{index}"
        life = self.world.life(name, GROUPS[index % len(GROUPS)])
        if life.running:
            return
        self.world.ask(name, life.computed * share // 100, max(new, 1), life.group)

    @rule(index=INDEX)
    def loaded(self, index: int) -> None:
        name = self._pick(index, running=True)
        if name is not None and self.world.lives[name].loading:
            self.world.loaded(name)

    @rule(index=INDEX, tokens=TOKENS, used=SHARE)
    def grow(self, index: int, tokens: int, used: int) -> None:
        """A running request produces some of the tokens that room was taken for."""
        name, cache = self._pick(index, running=True), self.world.cache
        if name is None or tokens > cache.room:
            return
        before = self.world.picture()
        written = cache.grow(tokens)
        after = self.world.picture()
        assert written == after.written_back - before.written_back
        produced = tokens * used // 100
        cache.shrink(tokens - produced)
        self.world.lives[name].grown += produced

    @rule(index=INDEX)
    def release(self, index: int) -> None:
        name = self._pick(index, running=True)
        if name is not None:
            self.world.release(name)

    @rule(index=INDEX)
    def back_up(self, index: int) -> None:
        name = self._pick(index, running=False)
        if name is not None:
            self.world.back_up(name)

    @precondition(lambda self: self.mode.labels)
    @rule(index=INDEX, label=st.sampled_from(Label))
    def relabel(self, index: int, label: Label) -> None:
        copy = self.world.cache.copies.get(f"p{index}")
        if copy is not None:
            self.world.cache.relabel(copy, label)

    @rule(index=INDEX)
    def drop(self, index: int) -> None:
        name = self._pick(index, running=False)
        if name is None:
            return
        cache, copy = self.world.cache, self.world.cache.copies[name]
        free, dram_free = cache.free + copy.hbm, cache.dram_free + copy.high - copy.low
        cache.drop(name)
        assert (cache.free, cache.dram_free) == (free, dram_free)
        assert name not in cache.copies
        self.world.lives[name].computed = 0

    @rule(tokens=st.integers(0, 250))
    def take_and_give_back(self, tokens: int) -> None:
        if self.world.take(tokens):
            self.world.cache.free += tokens

    @invariant()
    def laws_hold(self) -> None:
        self.world.check()
        if not self.mode.offload:
            assert self.world.cache.counters.written_back == 0
            assert self.world.cache.counters.backed_up == 0


def _machine(mode: str, *, strict: bool) -> type[Machine]:
    return type("Driver", (Machine,), {"mode": MODES[mode], "strict": strict})


@pytest.mark.parametrize("mode", MODES)
def test_random_lives_keep_the_laws_of_both_pools(mode: str) -> None:
    run_state_machine_as_test(
        _machine(mode, strict=False),
        settings=settings(SETTINGS, max_examples=100),
    )


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_class_the_least_recently_used_copy_loses_tokens_first(mode: str) -> None:
    run_state_machine_as_test(
        _machine(mode, strict=True),
        settings=settings(SETTINGS, max_examples=50),
    )
