"""What simulated prompts have in common, and the pages that their output needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sim.growth import Growth
from kvtier.sim.prompts import Prompts


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Pages that both begin with."""
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def test_programs_of_a_group_share_the_whole_pages_of_its_head() -> None:
    prompts = Prompts(16)
    one = prompts.next_prompt("a", 200, 0, "g", 100)
    other = prompts.next_prompt("b", 300, 0, "g", 70)
    longer = prompts.next_prompt("c", 300, 0, "g", 160)
    assert common(one, other) == 70 // 16
    assert common(one, longer) == 100 // 16
    assert common(one, prompts.next_prompt("d", 300, 0, "h", 100)) == 0


def test_a_turn_repeats_what_it_reuses_and_nothing_else() -> None:
    prompts = Prompts(16)
    first = prompts.next_prompt("a", 100, 0)
    after = prompts.with_output("a", 150)
    assert common(first, after) == first.size == 100 // 16
    turn = prompts.next_prompt("a", 200, 149)
    assert common(after, turn) == 149 // 16
    compacted = prompts.next_prompt("a", 120, 40)
    assert common(turn, compacted) == 40 // 16
    assert common(turn, prompts.next_prompt("a", 200, 120)) == 40 // 16


def test_an_ended_program_is_forgotten() -> None:
    prompts = Prompts(1)
    first = prompts.next_prompt("a", 10, 0)
    prompts.forget("a")
    assert common(first, prompts.next_prompt("a", 10, 10)) == 0


@given(
    page_size=st.sampled_from((1, 3, 16)),
    requests=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), max_size=8),
    step=st.integers(40, 80),
    num_steps=st.integers(0, 70),
    budget=st.integers(0, 60),
)
def test_growth_is_what_each_request_needs_by_itself(
    page_size: int, requests: list[tuple[int, int]], step: int, num_steps: int, budget: int
) -> None:
    growth = Growth(page_size)
    for context, since in requests:
        growth.add(context, since)

    def pages(steps: int) -> int:
        now = [context + step - since for context, since in requests]
        return sum(-(-(n + steps) // page_size) + (-n // page_size) for n in now)

    assert growth.pages(step, num_steps) == pages(num_steps)
    fits = growth.steps_within(step, budget, num_steps)
    assert pages(fits) <= budget
    assert fits == num_steps or pages(fits + 1) > budget
    for context, since in requests:
        growth.remove(context + step - since, step)
    assert growth.pages(step, 50) == 0
