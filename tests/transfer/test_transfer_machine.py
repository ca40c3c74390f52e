"""Random lives of transfer jobs on real pools, compared with a plain model after each operation."""

from __future__ import annotations

import pytest
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from .driver import COVERED, EFFECTIVE
from .machine import Machine
from .model import ENDED, LIVE, WITH_CHUNKS, Phase

ALL = (*LIVE, *ENDED)
REACHABLE = {
    **dict.fromkeys(("cancel", "raise priority", "poll", "wait", "result", "come after"), ALL),
    **dict.fromkeys(("read its source", "write its source"), ALL),
    **dict.fromkeys(("read its target", "write its target"), ALL),
    **dict.fromkeys(("chunk ends", "chunk fails"), WITH_CHUNKS),
    "hurry": LIVE,
    "close": ALL,
}
"""Phases in which each operation can meet a job."""


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            phases=(Stage.generate, Stage.shrink),
        ),
    )


def check_covered(times: int) -> None:
    expected: set[tuple[str, Phase]] = {
        (operation, phase) for operation, phases in REACHABLE.items() for phase in phases
    }
    rare = {pair: COVERED[pair] for pair in expected if COVERED[pair] < times}
    assert not rare
    assert set(COVERED) == expected


@pytest.mark.timeout(600)  # finding the shortest way to a failure takes minutes
def test_every_job_moves_its_bytes_or_fails_whatever_happens() -> None:
    COVERED.clear()
    EFFECTIVE.clear()
    run(examples=170, steps=12)
    assert EFFECTIVE.total() >= 10**4
    check_covered(times=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_operation_meets_jobs_in_every_state_again_and_again() -> None:
    COVERED.clear()
    EFFECTIVE.clear()
    run(examples=1500, steps=12)
    assert EFFECTIVE.total() >= 10**5
    check_covered(times=20)
