"""Shared heads: kept while somebody stands on them, evictable and reclaimable afterwards."""

from __future__ import annotations

import pytest

from kvtier.sim.cache import TierCache
from kvtier.sim.copies import CacheMode

from .cache_world import LABELS, MODES, NO_OFFLOAD, WRITE_BACK, WRITE_THROUGH, CacheWorld

TOOLS = ("tools", 20)


def make_world(mode: str = "no-offload", hbm: int = 60, dram: int = 60) -> CacheWorld:
    return CacheWorld(TierCache(hbm, dram, MODES[mode], 1))


def test_a_head_is_kept_once_and_found_by_the_next_program() -> None:
    world = make_world()
    assert world.ask("a", 0, 10, TOOLS)
    assert world.cache.free == 30
    assert world.ask("b", 0, 10, TOOLS)
    assert world.cache.free == 20


def test_a_head_stays_while_one_of_its_programs_runs() -> None:
    world = make_world()
    assert world.ask("a", 0, 10, TOOLS)
    assert world.ask("b", 0, 10, TOOLS)
    world.release("a")
    assert not world.ask("c", 0, 31)
    assert world.ask("c", 0, 30)
    assert world.heads[TOOLS[0]].hbm_tokens == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_head_behind_idle_copies_is_room(mode: str) -> None:
    world = make_world(mode)
    assert world.ask("a", 0, 10, TOOLS)
    world.release("a")
    assert (world.cache.room, world.cache.locked) == (60, 0)
    assert world.ask("b", 0, 50)
    assert world.heads[TOOLS[0]].hbm_tokens == 0


def test_a_head_goes_after_the_copies_that_stand_on_it() -> None:
    world = make_world()
    assert world.ask("a", 0, 10, TOOLS)
    world.release("a")
    assert world.ask("b", 0, 40)
    assert world.heads[TOOLS[0]].hbm_tokens == 20
    assert "a" not in world.cache.copies


def test_without_its_head_a_private_part_is_no_hit() -> None:
    world = make_world("write-back", hbm=60, dram=10)
    assert world.ask("a", 0, 10, TOOLS)
    world.release("a")
    assert world.ask("b", 0, 60)  # DRAM has room for the private part alone
    world.release("b")
    copy = world.cache.copy_of("a", "tools")
    assert copy.kept_tokens == 10
    hit = world.cache.match(copy, 20, 10)
    assert (hit.hbm_tokens, hit.dram_tokens) == (0, 0)


@pytest.mark.parametrize("mode", [WRITE_BACK, WRITE_THROUGH, LABELS])
def test_heads_of_programs_that_have_gone_do_not_fill_dram(mode: CacheMode) -> None:
    world = CacheWorld(TierCache(100, 30, mode, 1))
    assert world.ask("a", 0, 5, TOOLS)
    world.release("a")
    world.cache.drop("a")
    assert world.ask("b", 0, 25)
    world.release("b")
    assert world.back_up("b") == 25


def test_a_prompt_shorter_than_the_groups_head_hits_its_own_part() -> None:
    world = make_world()
    assert world.ask("a", 0, 10, TOOLS)
    copy = world.cache.copy_of("b", "tools")
    hit = world.cache.match(copy, 12, 0)
    assert (hit.hbm_tokens, hit.dram_tokens) == (12, 0)


def test_heads_of_different_groups_do_not_serve_each_other() -> None:
    world = CacheWorld(TierCache(60, 0, NO_OFFLOAD, 1))
    assert world.ask("a", 0, 10, TOOLS)
    copy = world.cache.copy_of("b", "other")
    assert world.cache.match(copy, 20, 0).hbm_tokens == 0
    assert world.cache.missing(copy, 20, 5) == 25


def test_a_longer_head_extends_the_one_that_is_there() -> None:
    world = make_world()
    assert world.ask("a", 0, 10, ("tools", 12))
    copy = world.cache.copy_of("b", "tools")
    hit = world.cache.match(copy, 20, 0)
    assert (hit.hbm_tokens, world.cache.missing(copy, 20, 5)) == (12, 8 + 5)


def test_a_program_is_charged_its_own_part_of_a_head() -> None:
    world = make_world(hbm=40)
    assert world.ask("long", 0, 5, ("tools", 30))
    world.release("long")
    assert world.ask("other", 0, 40)
    world.release("other")
    assert world.ask("short", 0, 28, ("tools", 12))
    assert world.cache.free == 0
