"""Eviction order, backups and locks of a TierCache, one situation at a time."""

from __future__ import annotations

import pytest

from kvtier.ids import Label
from kvtier.sim.cache import TierCache
from kvtier.sim.copies import CacheMode

from .cache_world import LABELS, MODES, NO_OFFLOAD, WRITE_BACK, WRITE_THROUGH, CacheWorld


def make_world(mode: CacheMode, hbm: int, dram: int = 0, page: int = 1) -> CacheWorld:
    return CacheWorld(TierCache(hbm, dram, mode, page))


def put(world: CacheWorld, program: str, tokens: int, label: Label = Label.BUSY) -> None:
    """The program ran a prompt of `tokens` and is idle."""
    assert world.ask(program, 0, tokens)
    world.release(program)
    world.cache.relabel(world.cache.copies[program], label)


def evict(world: CacheWorld, tokens: int) -> None:
    """Somebody needs `tokens` more than are free, for a moment."""
    needed = world.cache.free + tokens
    assert world.take(needed)
    world.cache.free += needed
    world.check()


def held(world: CacheWorld) -> dict[str, tuple[int, int]]:
    """Tokens of each program in (HBM, DRAM)."""
    return {n: (c.hbm, c.high - c.low) for n, c in sorted(world.cache.copies.items())}


# HBM ---------------------------------------------------------------------------------------


def test_hbm_loses_inactive_then_idle_then_busy_tokens() -> None:
    world = make_world(LABELS, 30)
    put(world, "busy", 10, Label.BUSY)
    put(world, "idle", 10, Label.IDLE)
    put(world, "gone", 10, Label.INACTIVE)
    evict(world, 5)
    assert held(world) == {"busy": (10, 0), "idle": (10, 0), "gone": (5, 0)}
    evict(world, 15)
    assert held(world) == {"busy": (10, 0)}


@pytest.mark.parametrize("mode", MODES)
def test_the_least_recently_used_copy_goes_first_and_from_its_tail(mode: str) -> None:
    world = make_world(MODES[mode], 30)
    for name in ("a", "b", "c"):
        put(world, name, 10)
    assert world.ask("a", 10, 0)
    world.release("a")
    evict(world, 13)
    assert held(world) == {"a": (10, 0), "c": (7, 0)}


def test_a_new_label_does_not_make_a_copy_recent() -> None:
    world = make_world(LABELS, 20)
    put(world, "older", 10)
    put(world, "newer", 10)
    for name in ("newer", "older"):
        world.cache.relabel(world.cache.copies[name], Label.IDLE)
    evict(world, 10)
    assert held(world) == {"newer": (10, 0)}


@pytest.mark.parametrize("mode", MODES)
def test_running_copies_keep_every_token_and_refuse_the_newcomer(mode: str) -> None:
    world = make_world(MODES[mode], 20, 20)
    assert world.ask("a", 0, 10)
    assert world.ask("b", 0, 6)
    assert not world.ask("c", 0, 5)
    assert held(world) == {"a": (10, 0), "b": (6, 0)}
    assert (world.cache.free, world.cache.locked) == (4, 16)


def test_a_refused_newcomer_leaves_no_lock_behind() -> None:
    world = make_world(WRITE_BACK, 20, 20)
    put(world, "back", 8)
    assert world.ask("a", 0, 10)
    assert not world.ask("back", 8, 5)
    evict(world, 8)
    assert held(world) == {"a": (10, 0), "back": (0, 8)}


def test_growth_takes_room_from_idle_copies_and_joins_the_copy_at_the_end() -> None:
    world = make_world(NO_OFFLOAD, 20)
    put(world, "idle", 10)
    assert world.ask("a", 0, 10)
    world.cache.grow(4)
    world.lives["a"].grown = 4
    world.release("a")
    assert held(world) == {"a": (14, 0), "idle": (6, 0)}
    assert world.cache.growing == 0


def test_room_that_grew_and_was_not_used_is_free_again() -> None:
    world = make_world(NO_OFFLOAD, 20)
    assert world.ask("a", 0, 10)
    world.cache.grow(8)
    world.cache.shrink(5)
    assert (world.cache.free, world.cache.growing) == (7, 3)


# Write-back and what DRAM loses ------------------------------------------------------------


def test_evicted_tokens_go_down_and_are_found_again() -> None:
    world = make_world(WRITE_BACK, 20, 20)
    put(world, "a", 15)
    put(world, "b", 12)
    assert held(world) == {"a": (8, 7), "b": (12, 0)}
    assert world.cache.counters.written_back == 7
    copy = world.cache.copies["a"]
    hit = world.cache.match(copy, 0, 15)
    assert (hit.hbm_tokens, hit.dram_tokens) == (8, 7)


def test_without_offload_evicted_tokens_are_dropped() -> None:
    world = make_world(NO_OFFLOAD, 20, 20)
    put(world, "a", 15)
    put(world, "b", 12)
    assert held(world) == {"a": (8, 0), "b": (12, 0)}
    assert world.cache.counters.dropped == 7
    assert world.cache.dram_capacity == 0


def test_an_inactive_copy_is_not_worth_a_write_back() -> None:
    world = make_world(LABELS, 20, 20)
    put(world, "gone", 15, Label.INACTIVE)
    put(world, "b", 12)
    assert held(world) == {"b": (12, 0), "gone": (8, 0)}


def _one_of_each(dram: int) -> CacheWorld:
    """DRAM full with 5 tokens each: INACTIVE, duplicate, BUSY sole, IDLE sole."""
    world = make_world(LABELS, 100, dram)
    for name, label in (("idle", Label.IDLE), ("busy", Label.BUSY), ("gone", Label.BUSY)):
        put(world, name, 5, label)
        assert world.back_up(name) == 5
    evict(world, 15)
    world.cache.relabel(world.cache.copies["gone"], Label.INACTIVE)
    put(world, "twice", 5, Label.BUSY)
    assert world.back_up("twice") == 5
    put(world, "new", 40)
    assert world.cache.dram_free == 0
    return world


@pytest.mark.parametrize(
    ("more", "left"),
    [
        (3, {"gone": 2, "twice": 5, "busy": 5, "idle": 5}),
        (10, {"twice": 0, "busy": 5, "idle": 5}),
        (12, {"twice": 0, "busy": 3, "idle": 5}),
        (18, {"twice": 0, "idle": 2}),
        (20, {"twice": 0}),
    ],
)
def test_dram_loses_inactive_duplicates_busy_then_idle_tokens(
    more: int, left: dict[str, int]
) -> None:
    world = _one_of_each(20)
    world.cache.match(world.cache.copies["new"], 0, more)  # cut to the size asked for
    world.cache.unmatch(world.cache.copies["new"], 0)
    assert world.cache.back_up(world.cache.copies["new"]) == more
    kept = {name: dram for name, (_, dram) in held(world).items() if name != "new"}
    assert kept == left


def test_dram_prefers_to_lose_the_copy_that_was_used_longest_ago() -> None:
    world = make_world(WRITE_BACK, 20, 20)
    put(world, "older", 10)
    put(world, "newer", 10)
    evict(world, 20)
    assert held(world) == {"newer": (0, 10), "older": (0, 10)}
    put(world, "third", 4)
    assert world.back_up("third") == 4
    assert held(world) == {"newer": (0, 10), "older": (0, 6), "third": (4, 4)}


def test_dram_goes_by_the_last_use_and_not_by_the_time_of_the_write_back() -> None:
    world = make_world(LABELS, 20, 20)
    put(world, "older", 10, Label.BUSY)
    put(world, "newer", 10, Label.IDLE)
    evict(world, 10)
    world.cache.relabel(world.cache.copies["newer"], Label.BUSY)
    evict(world, 10)
    put(world, "third", 4)
    assert world.back_up("third") == 4
    assert held(world) == {"newer": (0, 10), "older": (0, 6), "third": (4, 4)}


def test_write_back_reclaims_a_duplicate_when_dram_is_full_of_them() -> None:
    world = make_world(WRITE_BACK, 40, 20)
    put(world, "a", 20)
    assert world.back_up("a") == 20
    put(world, "b", 10)
    assert world.back_up("b") == 10
    assert held(world)["a"][0] == 20


def test_write_through_never_reclaims_a_duplicate() -> None:
    world = make_world(WRITE_THROUGH, 40, 20)
    put(world, "a", 20)
    assert world.back_up("a") == 20
    put(world, "b", 10)
    assert world.back_up("b") == 0
    assert held(world) == {"a": (20, 20), "b": (10, 0)}


def test_write_through_reclaims_what_hbm_has_lost() -> None:
    world = make_world(WRITE_THROUGH, 40, 20)
    put(world, "a", 20)
    world.back_up("a")
    put(world, "b", 20)
    evict(world, 8)
    assert world.back_up("b") == 0  # 8 tokens of a are sole, 20 are needed
    evict(world, 12)
    assert world.back_up("b") == 20
    assert held(world) == {"b": (20, 20)}


# Locks and sources -------------------------------------------------------------------------


def test_the_source_of_a_load_survives_the_room_that_is_made_for_it() -> None:
    world = make_world(WRITE_BACK, 20, 20)
    put(world, "p", 10)
    put(world, "q", 20)  # p is all in DRAM, the coldest there
    put(world, "r", 10)  # q is half in DRAM: both tiers are full
    assert held(world) == {"p": (0, 10), "q": (10, 10), "r": (10, 0)}
    assert world.ask("p", 10, 2)
    assert held(world)["p"] == (12, 10)
    world.loaded("p")


def test_a_loaded_source_may_be_reclaimed() -> None:
    world = make_world(WRITE_BACK, 20, 10)
    put(world, "p", 10)
    put(world, "q", 10)
    evict(world, 10)
    assert world.ask("p", 10, 0)
    world.loaded("p")
    assert world.back_up("q") == 10
    assert held(world) == {"p": (10, 0), "q": (10, 10)}


def test_full_tiers_of_pinned_pages_refuse_and_do_not_crash() -> None:
    world = make_world(WRITE_BACK, 20, 10)
    put(world, "p", 10)
    put(world, "q", 10)
    evict(world, 10)
    assert world.ask("p", 10, 0)  # DRAM is full, its pages are being read
    assert world.ask("q", 10, 0)
    assert not world.ask("new", 0, 1)
    world.release("q")
    assert world.ask("new", 0, 4)  # q's tail has nowhere to go: it is dropped
    assert held(world) == {"new": (4, 0), "p": (10, 10), "q": (6, 0)}
    assert world.cache.counters.dropped == 4


def test_a_failed_backup_never_counts_as_resident_in_dram() -> None:
    world = make_world(LABELS, 30, 10)
    put(world, "p", 10)
    assert world.back_up("p") == 10
    assert world.ask("p", 10, 0)  # its DRAM pages stay until the load is over
    put(world, "q", 8)
    assert world.back_up("q") == 0
    assert held(world)["q"] == (8, 0)
    evict(world, 8)
    assert "q" not in world.cache.copies


def test_dropping_a_program_frees_both_tiers() -> None:
    world = make_world(LABELS, 20, 20)
    put(world, "p", 10)
    world.back_up("p")
    world.cache.drop("p")
    assert (world.cache.free, world.cache.dram_free) == (20, 20)
    world.cache.drop("p")
    world.cache.check_integrity()


def test_a_running_copy_that_is_dropped_goes_when_it_is_released() -> None:
    world = make_world(LABELS, 20, 20)
    assert world.ask("p", 0, 10)
    world.cache.drop("p")
    assert held(world) == {"p": (10, 0)}
    world.cache.loaded(world.cache.copies["p"])
    world.cache.release(world.cache.copies["p"], 0, 0)
    assert (world.cache.free, held(world)) == (20, {})


# Prefixes ----------------------------------------------------------------------------------


def test_what_a_compaction_leaves_behind_goes_first() -> None:
    world = make_world(LABELS, 30, 0)
    put(world, "other", 10, Label.IDLE)
    put(world, "p", 20, Label.BUSY)
    assert world.ask("p", 5, 10)  # 15 tokens of the old branch are nobody's
    assert held(world) == {"other": (10, 0), "p": (15, 0)}
    evict(world, 5)
    assert held(world) == {"other": (10, 0), "p": (15, 0)}
    world.release("p")


def test_hits_are_whole_pages() -> None:
    world = make_world(NO_OFFLOAD, 100, page=16)
    put(world, "p", 40)
    hit = world.cache.match(world.cache.copies["p"], 0, 40)
    assert (hit.hbm_tokens, hit.dram_tokens) == (32, 0)


def test_a_smaller_reuse_than_what_is_here_bounds_the_hit() -> None:
    world = make_world(WRITE_BACK, 20, 20)
    put(world, "p", 15)
    evict(world, 10)
    hit = world.cache.match(world.cache.copies["p"], 0, 8)
    assert (hit.hbm_tokens, hit.dram_tokens) == (5, 3)
