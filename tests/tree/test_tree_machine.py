"""Random lives of a whole tree, compared with a plain model of it after each step."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.tree.node import State

from .driver import COVERED
from .machine import Machine

_A, _W, _P, _R = State.ABSENT, State.WRITING, State.PRESENT, State.READING
HBM_ALONE, DRAM_ALONE, BOTH = (_P, _A), (_A, _P), (_P, _P)
DEMOTED, PROMOTED = (_R, _W), (_W, _R)
"""A copy to DRAM, or to HBM, is under way."""
ALL = (HBM_ALONE, DRAM_ALONE, BOTH, DEMOTED, PROMOTED)

REACHABLE = {
    **dict.fromkeys(("match", "insert", "insert refused", "split", "protect", "unprotect"), ALL),
    **dict.fromkeys(("begin", "rematch", "retract", "end well", "abort"), ALL),
    **dict.fromkeys(("relabel", "stale epoch", "release", "compaction"), ALL),
    "publish": (HBM_ALONE, BOTH, DEMOTED, PROMOTED),
    "join": (HBM_ALONE, DRAM_ALONE, BOTH),
    "grow": (HBM_ALONE,),
    "evict HBM": (HBM_ALONE, BOTH),
    "evict DRAM": (DRAM_ALONE, BOTH),
    "copy to DRAM": (HBM_ALONE,),
    "copy to HBM": (DRAM_ALONE,),
    "finish well": (DEMOTED, PROMOTED),
    "cancel": (DEMOTED, PROMOTED),
}
"""States of HBM and DRAM in which each operation can meet a page."""


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
        ),
    )


@pytest.mark.timeout(600)  # finding the shortest way to a failure takes minutes
def test_a_tree_holds_what_the_model_holds_after_every_step() -> None:
    run(examples=120, steps=10)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_operation_meets_pages_in_every_state_a_hundred_times() -> None:
    COVERED.clear()
    run(examples=1500, steps=12)
    expected = {(operation, pair) for operation, pairs in REACHABLE.items() for pair in pairs}
    rare = {pair: COVERED[pair] for pair in expected if COVERED[pair] < 100}
    assert not rare
    assert set(COVERED) == expected
