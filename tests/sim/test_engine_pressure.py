"""Decode that runs out of room, demotions that find none, and reports of tokens."""

from __future__ import annotations

import pytest

from kvtier.ids import Direction, Label
from kvtier.sim.request import EngineSettings
from kvtier.tree.node import Tier

from .engine_world import LABELS, EngineWorld, LinearCost


def test_when_decode_runs_out_of_room_the_latest_goes_back_and_still_ends_in_full() -> None:
    world = EngineWorld(hbm=200)
    world.ask_at(0.0, "first", context=80, output=60)
    world.ask_at(0.001, "second", context=80, output=60)
    world.run()
    counters = world.engine.counters
    assert counters.retractions == 1
    assert counters.truncated == 0
    assert counters.output == 120
    assert world.ended["first"] < world.ended["second"]
    # It had the prompt and some 20 tokens; what was evicted of them is computed again.
    assert counters.recomputed > 0
    assert counters.prompt == counters.hbm_hit + counters.dram_hit + counters.prefilled


def test_a_retracted_request_goes_before_those_that_have_not_run() -> None:
    world = EngineWorld(hbm=200)
    world.ask_at(0.0, "first", context=80, output=60)
    world.ask_at(0.001, "second", context=80, output=60)
    world.ask_at(0.002, "third", context=150, output=2)
    world.run()
    assert world.engine.counters.retractions == 1
    assert world.ended["second"] < world.first["third"]


def test_growth_evicts_what_is_cached_before_anybody_is_retracted() -> None:
    world = EngineWorld(hbm=200)
    world.ask_at(0.0, "cached", context=100, output=1)
    world.ask_at(1.0, "run", context=80, output=110)
    world.run()
    assert world.engine.counters.retractions == 0
    assert world.cache.kept("cached") == (200 - (80 + 109),) * 2


def test_a_lone_request_that_fills_hbm_ends_short_and_is_counted() -> None:
    world = EngineWorld(hbm=100)
    world.ask_at(0.0, "r", context=90, output=50)
    world.run()
    counters = world.engine.counters
    assert counters.truncated == 1
    assert counters.output == 11  # the first token, and ten that had room
    assert counters.finished_requests == 1


def test_the_next_request_runs_after_a_truncated_one() -> None:
    world = EngineWorld(hbm=100)
    world.ask_at(0.0, "r", context=90, output=50)
    world.ask_at(0.01, "next", context=60, output=2)
    world.run()
    assert world.first["next"] >= world.ended["r"]


def test_a_decode_is_not_cut_short_while_another_prompt_holds_the_room() -> None:
    limits = EngineSettings(chunk_tokens=10, max_running=8, reserve_tokens=8)
    world = EngineWorld(hbm=1000, settings=limits)
    world.ask_at(0.0, "decode", context=100, output=60)
    world.ask_at(0.16, "prefill", context=870, output=5)
    world.run()
    assert world.engine.counters.truncated == 0
    assert world.engine.counters.output == 65


def test_a_demotion_reports_when_its_bytes_have_arrived() -> None:
    world = EngineWorld(hbm=1000, dram=1000, mode=LABELS, link_bytes_per_s=1e6)
    world.ask_at(0.0, "r", context=500, output=1, program="p")
    world.run()
    at_s, told = world.heap.now_s, []
    world.cache.relabel("p", Label.IDLE)
    assert world.engine.demote("p", lambda now_s, tokens: told.append((now_s, tokens)))
    assert told == []
    world.run()
    assert told == [(pytest.approx(at_s + 500_000 / 974_000), 500)]


def test_a_demotion_without_room_in_dram_is_refused() -> None:
    world = EngineWorld(hbm=1000, dram=300, mode=LABELS)
    world.ask_at(0.0, "r", context=500, output=1, program="p")
    world.run()
    world.cache.relabel("p", Label.IDLE)
    assert not world.engine.demote("p", lambda now_s, tokens: pytest.fail("nothing moved"))
    world.run()
    assert world.cache.manager.pools[Tier.DRAM].num_taken == 0


def test_a_demotion_of_a_running_program_or_of_an_unknown_one_is_refused() -> None:
    world = EngineWorld(hbm=1000, dram=1000, mode=LABELS)
    world.ask_at(0.0, "r", context=500, output=100, program="p")
    world.run(until_s=0.2)
    assert not world.engine.demote("p", lambda now_s, tokens: None)
    assert not world.engine.demote("nobody", lambda now_s, tokens: None)
    world.run()


def test_a_busy_program_is_not_copied_down() -> None:
    world = EngineWorld(hbm=1000, dram=1000, mode=LABELS)
    world.ask_at(0.0, "r", context=500, output=1, program="p")
    world.run()
    assert world.engine.demote("p", lambda now_s, tokens: pytest.fail("nothing moved"))
    world.run()
    assert world.link.moved_bytes[Direction.D2H] == 0


def test_tokens_are_reported_as_they_are_produced() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.01, token_s=0.0, pair_s=0.0))
    world.ask_at(0.0, "r", context=50, output=1000)
    world.run(until_s=5.0)
    world.heap.now_s = 5.0
    reported = sum(tokens for _, tokens in world.engine.produced_since_report())
    assert reported == pytest.approx(500, abs=1)
    world.run(until_s=7.5)
    world.heap.now_s = 7.5
    reported += sum(tokens for _, tokens in world.engine.produced_since_report())
    assert reported == pytest.approx(750, abs=1)
    world.run()
    assert world.engine.counters.output == 1000
