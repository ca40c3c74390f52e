"""Batching, queueing and hits of one engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.sim.request import EngineSettings

from .engine_world import MODES, WRITE_BACK, EngineWorld, LinearCost


def test_a_lone_request_takes_its_prefill_steps_and_one_step_per_further_token() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.01, token_s=0.0, pair_s=0.0))
    world.ask_at(1.0, "r", context=250, output=5)
    world.run()
    assert world.first["r"] == pytest.approx(1.0 + 3 * 0.01)
    assert world.ended["r"] == pytest.approx(1.0 + 7 * 0.01)
    counters = world.engine.counters
    assert (counters.prompt, counters.prefilled, counters.output) == (250, 250, 5)
    assert counters.busy_s == pytest.approx(0.07)


def test_prefill_is_priced_where_each_chunk_starts() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.0, token_s=0.0, pair_s=1.0))
    world.ask_at(0.0, "r", context=250, output=1)
    world.run()
    assert world.first["r"] == pytest.approx(250 * 125)


def test_a_request_of_one_token_ends_with_its_first() -> None:
    world = EngineWorld()
    world.ask_at(0.0, "r", context=10, output=1)
    world.run()
    assert world.first == world.ended
    assert world.engine.counters.output == 1


def test_a_short_prompt_waits_behind_a_long_one() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.01, token_s=0.0, pair_s=0.0))
    world.ask_at(0.0, "long", context=1000, output=1)
    world.ask_at(0.005, "short", context=50, output=1)
    world.run()
    assert world.ttft_s("long") == pytest.approx(10 * 0.01)
    assert world.ttft_s("short") == pytest.approx(11 * 0.01 - 0.005)


def test_prompts_that_fit_one_chunk_share_a_step() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.01, token_s=0.0, pair_s=0.0))
    for name in ("a", "b", "c"):
        world.ask_at(0.0, name, context=30, output=1)
    world.run()
    assert world.first["c"] <= 0.02 + 1e-9


def test_a_prefill_beside_it_slows_a_decode() -> None:
    alone, beside = EngineWorld(), EngineWorld()
    for world in (alone, beside):
        world.ask_at(0.0, "decode", context=50, output=60)
    beside.ask_at(0.2, "prefill", context=3000, output=1)
    alone.run()
    beside.run()
    # 30 chunks of 100 tokens run beside it, 0.01 s each for its products alone.
    assert beside.ended["decode"] > alone.ended["decode"] + 30 * 0.01
    assert beside.engine.counters.output == alone.engine.counters.output + 1


def test_an_arrival_waits_for_the_running_step_and_no_longer() -> None:
    world = EngineWorld(cost=LinearCost(fixed_s=0.01, token_s=0.0, pair_s=0.0))
    world.ask_at(0.0, "decode", context=50, output=1000)
    world.ask_at(0.215, "late", context=50, output=1)
    world.run()
    assert world.first["late"] == pytest.approx(0.22 + 0.01)
    assert world.ended["decode"] == pytest.approx(1000 * 0.01)


def test_a_second_step_computes_only_what_is_new() -> None:
    world = EngineWorld()
    world.ask_at(0.0, "r1", context=500, output=10, program="p")
    world.ask_at(5.0, "r2", context=600, output=10, program="p", reused=509)
    world.run()
    counters = world.engine.counters
    assert counters.hbm_hit == 509
    assert counters.prefilled == 500 + 91
    assert counters.recomputed == 0
    assert world.ttft_s("r2") < world.ttft_s("r1")


def test_a_whole_prompt_hit_still_computes_one_token() -> None:
    world = EngineWorld()
    world.ask_at(0.0, "r1", context=500, output=10, program="p")
    world.ask_at(5.0, "r2", context=500, output=1, program="p", reused=500)
    world.run()
    assert world.engine.counters.prefilled == 501


def test_a_reuse_that_was_evicted_is_recomputed_and_counted() -> None:
    world = EngineWorld(hbm=1000)
    world.ask_at(0.0, "r1", context=500, output=1, program="p")
    world.ask_at(5.0, "big", context=900, output=1)
    world.ask_at(10.0, "r2", context=600, output=1, program="p", reused=500)
    world.run()
    counters = world.engine.counters
    assert counters.hbm_hit == 100
    assert counters.recomputed == 400


def test_no_more_than_max_running_requests_run_and_they_start_in_order() -> None:
    world = EngineWorld(settings=EngineSettings(chunk_tokens=100, max_running=2, reserve_tokens=0))
    for index in range(6):
        world.ask_at(0.001 * index, f"r{index}", context=20, output=10 + index)
    peak = 0
    while world.heap.step(float("inf")):
        peak = max(peak, world.engine.num_running)
    assert peak == 2
    names = [f"r{i}" for i in range(6)]
    assert sorted(world.first, key=world.first.__getitem__) == names
    assert set(world.ended) == set(names)


def test_room_for_tokens_to_come_is_kept_at_admission() -> None:
    limits = EngineSettings(chunk_tokens=1000, max_running=8, reserve_tokens=100)
    world = EngineWorld(hbm=1000, settings=limits)
    world.ask_at(0.0, "a", context=500, output=50)
    world.ask_at(0.001, "b", context=350, output=5)  # 350 of 500 left, less than 2 x 100 beside
    world.run()
    assert world.first["b"] > world.ended["a"]


# Loads -------------------------------------------------------------------------------------


def _return_from_dram(link_bytes_per_s: float) -> EngineWorld:
    world = EngineWorld(hbm=1000, dram=2000, mode=WRITE_BACK, link_bytes_per_s=link_bytes_per_s)
    world.ask_at(0.0, "r1", context=800, output=1, program="p")
    world.ask_at(5.0, "other", context=900, output=1)
    world.ask_at(50.0, "r2", context=810, output=1, program="p", reused=800)
    world.run()
    return world


def test_loads_are_on_the_critical_path() -> None:
    fast, slow = _return_from_dram(1e7), _return_from_dram(1e6)
    for world in (fast, slow):
        assert world.engine.counters.dram_hit == 700
        assert world.engine.counters.hbm_hit == 100
    # 700 tokens of 1000 bytes come up; 710 must go down first, and both directions share.
    assert fast.ttft_s("r2") > 0.07
    assert slow.ttft_s("r2") > 9 * fast.ttft_s("r2") * 0.9


def test_a_prefix_in_dram_beats_computing_it_on_a_fast_link() -> None:
    with_dram = _return_from_dram(1e9)
    without = EngineWorld(hbm=1000)
    without.ask_at(0.0, "r1", context=800, output=1, program="p")
    without.ask_at(5.0, "other", context=900, output=1)
    without.ask_at(50.0, "r2", context=810, output=1, program="p", reused=800)
    without.run()
    assert with_dram.ttft_s("r2") < without.ttft_s("r2")


def test_a_prompt_waits_until_its_room_has_been_written_back() -> None:
    world = EngineWorld(hbm=1000, dram=2000, mode=WRITE_BACK, link_bytes_per_s=1e6)
    world.ask_at(0.0, "a", context=900, output=1)
    world.ask_at(5.0, "b", context=900, output=1)
    world.run()
    # 800 tokens of 1000 bytes at 0.974 MB/s.
    assert world.ttft_s("b") > 0.8


def test_decodes_go_on_while_a_load_is_under_way() -> None:
    world = EngineWorld(hbm=2000, dram=2000, mode=WRITE_BACK, link_bytes_per_s=1e5)
    world.ask_at(0.0, "r1", context=800, output=1, program="p")
    world.ask_at(2.0, "other", context=1500, output=1)
    world.ask_at(30.0, "decode", context=10, output=200)
    world.ask_at(30.5, "r2", context=800, output=1, program="p", reused=800)
    world.run()
    assert world.ended["decode"] < world.first["r2"]


# Conservation ------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 4), st.integers(1, 400), st.integers(1, 80)),
    min_size=1,
    max_size=14,
)


@given(
    ARRIVALS,
    st.sampled_from(list(MODES)),
    st.sampled_from([1, 16]),
    st.integers(900, 3000),
    st.integers(0, 3000),
)
@settings(max_examples=150)
def test_random_arrivals_end_once_with_all_their_tokens_accounted_for(
    arrivals: list[tuple[float, int, int, int]], mode: str, page: int, hbm: int, dram: int
) -> None:
    world = EngineWorld(hbm=hbm, dram=dram, mode=MODES[mode], page=page, link_bytes_per_s=1e6)
    arrivals.sort(key=lambda a: a[0])
    for index, (at_s, program, context, output) in enumerate(arrivals):
        group = ("tools", 30) if program % 2 else None
        world.ask_at(
            at_s + 40.0 * index,  # a program asks one thing at a time
            f"r{index}",
            context + (30 if group else 0),
            output,
            program=f"p{program}",
            reused=min(context // 2, 200) + (30 if group else 0),
            group=group,
        )
    world.run()
    counters = world.engine.counters
    assert counters.output == sum(a[3] for a in arrivals)
    assert counters.prompt == counters.hbm_hit + counters.dram_hit + counters.prefilled
    assert counters.finished_requests == len(arrivals)
    assert world.engine.produced_since_report() == []
    for name in world.requests:
        assert world.asked[name] < world.first[name] <= world.ended[name]


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 150)),
        min_size=2,
        max_size=20,
    ),
    st.sampled_from(list(MODES)),
    st.integers(500, 1200),
)
@settings(max_examples=150)
def test_a_crowd_that_overflows_hbm_still_ends_with_all_its_output(
    arrivals: list[tuple[float, int, int]], mode: str, hbm: int
) -> None:
    world = EngineWorld(hbm=hbm, dram=400, mode=MODES[mode], link_bytes_per_s=1e6)
    for index, (at_s, context, output) in enumerate(sorted(arrivals)):
        world.ask_at(at_s, f"r{index}", context, output)
    world.run()
    counters = world.engine.counters
    assert counters.truncated == 0
    assert counters.output == sum(a[2] for a in arrivals)
    assert counters.prompt == counters.hbm_hit + counters.dram_hit + counters.prefilled
