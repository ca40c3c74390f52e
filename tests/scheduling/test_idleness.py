"""Iota: how much of its last k cycles a program spent outside the GPU (design section 6)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.scheduling import IdlenessRing

from .scene import PROPERTY

SECONDS = st.floats(0.0, 1e6, allow_nan=False)
LONG_SECONDS = st.floats(-1e6, 1e6, allow_nan=False)
CYCLES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)
STEPS_S = st.sampled_from((-3600.0, 3600.0, -0.2, 0.0))


def lived(cycles: list[tuple[float, float]], window: int = 5) -> tuple[IdlenessRing, float]:
    """A ring after whole cycles of (reasoning_s, acting_s), and the time at which they end."""
    ring, now_s = IdlenessRing(window), 0.0
    for reasoning_s, acting_s in cycles:
        now_s += reasoning_s
        ring.inference_ended(reasoning_s, now_s)
        now_s += acting_s
        ring.gap_ended(now_s)
    return ring, now_s


@PROPERTY
@given(CYCLES, SECONDS, st.integers(1, 8))
def test_iota_is_the_acting_share_of_the_last_k_cycles_and_the_running_gap(
    cycles: list[tuple[float, float]], age_s: float, window: int
) -> None:
    ring, _ = lived(cycles, window)
    start_s = 0.0
    ring.inference_ended(7.0, start_s)
    kept = [*cycles, (7.0, 0.0)][-window:]
    reasoning_s = sum(reasoning for reasoning, _ in kept)
    acting_s = sum(acting for _, acting in kept) + age_s
    expected = acting_s / (reasoning_s + acting_s)
    assert ring.value(start_s + age_s) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@PROPERTY
@given(st.lists(st.tuples(st.booleans(), LONG_SECONDS, LONG_SECONDS), max_size=40), LONG_SECONDS)
def test_iota_stays_in_bounds_whatever_the_order_of_calls_and_the_clock(
    calls: list[tuple[bool, float, float]], now_s: float
) -> None:
    ring = IdlenessRing(5)
    for inference, reasoning_s, at_s in calls:
        if inference:
            ring.inference_ended(reasoning_s, at_s)
        else:
            ring.gap_ended(at_s)
        assert 0.0 <= ring.value(at_s) <= 1.0
        assert ring.gap_age_s(at_s) >= 0.0
    assert 0.0 <= ring.value(now_s) <= 1.0


@PROPERTY
@given(CYCLES, SECONDS)
def test_held_time_changes_nothing(cycles: list[tuple[float, float]], held_s: float) -> None:
    ring, end_s = lived(cycles)
    before = ring.value(end_s)
    assert ring.value(end_s + held_s) == before
    assert ring.gap_age_s(end_s + held_s) == 0.0
    ring.gap_ended(end_s + held_s)
    assert ring.value(end_s + held_s) == before


@PROPERTY
@given(CYCLES, SECONDS, STEPS_S, SECONDS)
def test_a_clock_step_in_a_gap_keeps_iota_in_bounds(
    cycles: list[tuple[float, float]], age_s: float, step_s: float, later_s: float
) -> None:
    ring, now_s = lived(cycles)
    ring.inference_ended(1.0, now_s)
    for time_s in (now_s + age_s, now_s + age_s + step_s, now_s + age_s + step_s + later_s):
        assert 0.0 <= ring.value(time_s) <= 1.0
    ring.gap_ended(now_s + age_s + step_s)
    assert 0.0 <= ring.value(now_s + age_s + step_s) <= 1.0


def test_a_clock_that_steps_back_adds_no_time() -> None:
    ring = IdlenessRing(5)
    ring.inference_ended(10.0, 4000.0)
    assert ring.gap_age_s(400.0) == 0.0
    ring.gap_ended(400.0)
    assert ring.value(400.0) == 0.0


def test_a_backward_slew_in_a_gap_costs_no_more_than_the_slew() -> None:
    ring = IdlenessRing(5)
    ring.inference_ended(10.0, 100.0)
    assert ring.value(129.8) == pytest.approx(29.8 / 39.8)


def test_an_inference_that_seems_to_end_before_it_began_counts_no_time() -> None:
    ring = IdlenessRing(5)
    ring.inference_ended(-3600.0, 10.0)
    assert ring.value(10.0) == 0.0
    assert ring.value(20.0) == 1.0


def test_an_empty_ring_is_busy() -> None:
    ring = IdlenessRing(5)
    assert ring.value(1e9) == 0.0
    ring.gap_ended(5.0)
    assert ring.value(1e9) == 0.0


def test_the_window_forgets_the_cycle_before_the_last_k() -> None:
    ring, now_s = lived([(1.0, 1000.0), *[(1.0, 1.0)] * 4])
    assert ring.value(now_s) > 0.99
    ring.inference_ended(1.0, now_s)
    ring.gap_ended(now_s + 1.0)
    assert ring.value(now_s + 1.0) == 0.5


def test_short_tools_only_give_almost_zero() -> None:
    ring, now_s = lived([(20.0, 0.2)] * 5)
    assert ring.value(now_s) < 0.02


@PROPERTY
@given(CYCLES, st.lists(SECONDS, min_size=2, max_size=10).map(sorted))
def test_iota_never_falls_while_a_tool_runs(
    cycles: list[tuple[float, float]], ages_s: list[float]
) -> None:
    ring, now_s = lived(cycles)
    ring.inference_ended(5.0, now_s)
    values = [ring.value(now_s + age_s) for age_s in ages_s]
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_iota_approaches_one_while_a_long_tool_runs() -> None:
    ring, now_s = lived([(10.0, 1.0)] * 5)
    ring.inference_ended(10.0, now_s)
    values = [ring.value(now_s + age_s) for age_s in (0.0, 10.0, 100.0, 10_000.0)]
    assert values == sorted(values)
    assert len(set(values)) == 4
    assert values[-1] > 0.99


def test_one_long_tool_among_short_ones_is_diluted_and_a_run_of_them_is_not() -> None:
    outlier, now_s = lived([(10.0, 1.0)] * 4 + [(10.0, 30.0)])
    run, run_now_s = lived([(10.0, 30.0)] * 5)
    alone, alone_now_s = lived([(10.0, 30.0)], window=1)
    assert outlier.value(now_s) < 0.5 < alone.value(alone_now_s)
    assert run.value(run_now_s) == pytest.approx(0.75)
