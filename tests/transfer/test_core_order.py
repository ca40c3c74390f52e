"""Which job gets the next chunk, and when the window lets it go."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.transfer.job import JobState, Priority
from kvtier.transfer.order import FairClock, Rank, ReadyQueue, Urgency

from .cores import D2H, H2D, PAGE_BYTES, Scene, order

URGENT, NORMAL, BACKGROUND = Priority


def test_priority_goes_before_deadline_and_deadline_before_submission() -> None:
    scene = Scene(window_pages=1)
    late = scene.job(priority=NORMAL, deadline_s=9.0)
    none = scene.job(priority=NORMAL)
    soon = scene.job(priority=NORMAL, deadline_s=1.0)
    last = scene.job(priority=BACKGROUND, deadline_s=0.0)
    first = scene.job(priority=URGENT)
    assert order(scene.run()) == [first, soon, late, none, last]


def test_equal_jobs_go_first_come_first_served() -> None:
    scene = Scene(window_pages=2)
    jobs = [scene.job(pages=7) for _ in range(5)]
    assert order(scene.run()) == jobs


def test_an_urgent_job_overtakes_between_two_chunks() -> None:
    scene = Scene(chunk_pages=2, window_pages=2)
    large = scene.job(pages=10, priority=NORMAL)
    (first,) = scene.issue()
    urgent = scene.job(pages=1, priority=URGENT)
    assert scene.issue() == []
    scene.end(first)
    assert order(scene.run()) == [urgent, large]


def test_b20_one_page_behind_4000_of_the_same_priority_does_not_wait_for_them() -> None:
    scene = Scene(chunk_pages=10, window_pages=10, num_pages=4001)
    large = scene.job(pages=4000)
    in_flight = scene.issue()
    small = scene.job(pages=1)
    for chunk in in_flight:
        scene.end(chunk)
    assert scene.issue()[0].job is small
    assert order(scene.run()) == [large]


def test_small_jobs_cannot_starve_a_large_one() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    large = scene.job(pages=10)
    overtaken_by = 0
    while large.state is not JobState.DONE:
        scene.job(pages=1)
        (chunk,) = scene.issue()
        overtaken_by += chunk.job is not large
        scene.end(chunk)
        assert overtaken_by <= 100
    assert overtaken_by > 0


def test_the_window_bounds_bytes_in_flight_per_direction() -> None:
    scene = Scene(chunk_pages=2, window_pages=5)
    scene.job(H2D, pages=20)
    scene.job(D2H, pages=20)
    assert len(scene.issue()) == 4
    for direction in (H2D, D2H):
        assert scene.core.in_flight_bytes(direction) == 4 * PAGE_BYTES
        assert scene.core.queued_bytes(direction) == 16 * PAGE_BYTES
    first = scene.in_flight[0]
    scene.end(first)
    assert [chunk.direction for chunk in scene.issue()] == [first.direction]


def test_a_window_smaller_than_a_chunk_lets_one_chunk_go_at_a_time() -> None:
    scene = Scene(chunk_pages=4, window_pages=1)
    scene.job(pages=12)
    for _ in range(3):
        (chunk,) = scene.issue()
        scene.end(chunk)
    assert scene.core.num_live == 0


def test_raising_the_priority_moves_a_job_forward_and_never_back() -> None:
    scene = Scene(window_pages=1)
    jobs = [scene.job() for _ in range(3)]
    scene.core.raise_priority(jobs[2], URGENT)
    scene.core.raise_priority(jobs[2], BACKGROUND)
    scene.core.raise_priority(jobs[0], BACKGROUND, deadline_s=0.0)
    scene.core.check_integrity()
    assert jobs[2].priority is URGENT
    assert order(scene.run()) == [jobs[2], jobs[0], jobs[1]]
    scene.core.raise_priority(jobs[0], URGENT)
    assert jobs[0].priority is NORMAL


def test_times_of_a_job_are_those_of_its_first_start_and_its_end() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    job = scene.job(pages=2, deadline_s=8.0)
    for scene.now_s in (5.0, 7.0):
        scene.issue()
        scene.now_s += 1.0
        scene.end(scene.in_flight[0])
    assert (job.submitted_s, job.started_s, job.ended_s) == (0.0, 5.0, 8.0)
    counters = scene.core.counters[H2D]
    assert (counters.waiting_s, counters.copying_s, counters.late) == (5.0, 2.0, 0)


def test_a_job_that_misses_its_deadline_is_done_and_counted() -> None:
    scene = Scene()
    job = scene.job(deadline_s=1.0)
    scene.now_s = 2.0
    scene.run()
    assert job.state is JobState.DONE
    assert scene.core.counters[H2D].late == 1


def sharing_ends(arrivals: list[tuple[int, int]]) -> list[float]:
    """When each job ends if all that are there share the link evenly; in bytes served by then."""
    left = [float(size) for _, size in arrivals]
    ends = [math.inf] * len(left)
    now = 0.0
    while any(left):
        there = [at for at, (start, _) in enumerate(arrivals) if start <= now and left[at]]
        coming = [start for start, _ in arrivals if start > now]
        if not there:
            now = float(min(coming))
            continue
        share = min(
            min(left[at] for at in there), (min(coming, default=math.inf) - now) / len(there)
        )
        now += share * len(there)
        for at in there:
            left[at] = 0.0 if left[at] - share < 1e-9 else left[at] - share
            if not left[at]:
                ends[at] = now
    return ends


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=12))
def test_no_job_ends_later_than_it_would_by_sharing(arrivals: list[tuple[int, int]]) -> None:
    arrivals = sorted(arrivals)
    clock = FairClock()
    turns: dict[int, float] = {}
    left: dict[int, int] = {}
    coming = list(enumerate(arrivals))
    ends = [0.0] * len(arrivals)
    now = 0
    while coming or left:
        while coming and coming[0][1][0] <= now:
            at, (_, size) = coming.pop(0)
            turns[at], left[at] = clock.enter(size), size
        if left:
            at = min(left, key=lambda job: (turns[job], job))
            left[at] -= 1
            clock.serve(1)
            if not left[at]:
                del left[at]
                ends[at] = now + 1
        now += 1
    # A byte cannot be cut, so that each job may come late by one byte.
    for mine, theirs in zip(ends, sharing_ends(arrivals), strict=True):
        assert mine <= theirs + len(arrivals)


@given(st.lists(st.tuples(st.sampled_from(["enter", "serve", "leave"]), st.integers(1, 20))))
def test_turns_of_jobs_that_are_over_do_not_pile_up(steps: list[tuple[str, int]]) -> None:
    clock = FairClock()
    jobs: list[list[float]] = []  # turn, bytes left
    for step, amount in steps:
        if step == "enter":
            jobs.append([clock.enter(amount), amount])
        elif jobs and step == "serve":
            job = min(jobs)
            served = min(amount, job[1])
            job[1] -= served
            clock.serve(served)
            jobs = [job for job in jobs if job[1]]
        elif jobs:
            turn, left = jobs.pop(amount % len(jobs))
            clock.leave(turn, int(left))
        virtual = sum(turn - clock._now for turn in clock._turns)
        assert virtual <= sum(left for _, left in jobs) + 1e-6
    if not jobs:
        assert all(turn - clock._now < 1e-6 for turn in clock._turns)


def rank(job_id: int, turn: float) -> Rank:
    return Rank(Urgency(True, NORMAL, math.inf), turn, job_id)


@pytest.mark.parametrize("keep", [0, 3])
def test_a_queue_keeps_nothing_of_those_that_left(keep: int) -> None:
    queue = ReadyQueue()
    for job_id in range(keep):
        queue.put(rank(job_id, -1.0))
    for job_id in range(keep, 5000):
        queue.put(rank(job_id, 1.0))
        queue.put(rank(job_id, 0.5))
        queue.discard(job_id)
        assert job_id not in queue
    assert len(queue) == keep
    assert len(queue._heap) <= 2 * keep + 66
    first = queue.first()
    assert (first is None) == (keep == 0)
