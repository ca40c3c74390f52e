"""How jobs end: done, failed, cancelled, and what becomes of those that wait for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from kvtier.errors import TransferError
from kvtier.transfer.job import Job, JobState, Priority

from .cores import D2H, H2D, PAGE_BYTES, Scene, order

FAULT = OSError("the wire broke")


def states(*jobs: Job) -> list[str]:
    return [str(job.state) for job in jobs]


def test_a_job_is_done_with_its_last_chunk() -> None:
    scene = Scene(chunk_pages=2)
    job = scene.job(pages=5)
    assert job.state is JobState.QUEUED
    chunks = scene.issue()
    assert job.state is JobState.IN_FLIGHT
    for chunk, pages_done in zip((chunks[1], chunks[2]), (2, 3), strict=True):
        assert scene.end(chunk) == []
        assert job.pages_done == pages_done
    assert scene.end(chunks[0]) == [job]
    assert (job.state, job.pages_done, job.num_bytes) == (JobState.DONE, 5, 5 * PAGE_BYTES)


def test_a_queued_job_is_cancelled_at_once() -> None:
    scene = Scene(window_pages=1)
    scene.job()
    scene.issue()
    job = scene.job()
    assert scene.cancel(job)
    assert scene.ended == [job]
    assert job.state is JobState.CANCELLED
    assert not scene.cancel(job)


def test_a_job_between_two_chunks_is_cancelled_at_once() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    job = scene.job(pages=3)
    scene.end(scene.issue()[0])
    assert scene.cancel(job)
    assert scene.ended == [job]
    assert scene.issue() == []


def test_law_2_a_cancelled_job_keeps_its_pages_until_its_chunks_in_flight_have_ended() -> None:
    scene = Scene(chunk_pages=1, window_pages=2)
    job = scene.job(pages=3)
    first, second = scene.issue()
    assert scene.cancel(job)
    assert scene.cancel(job)
    assert scene.end(first) == []
    assert scene.issue() == []
    assert job.state is JobState.IN_FLIGHT
    scene.refuses("is in another live job", Job(H2D, job.source_pages, job.target_pages))
    assert scene.end(second) == [job]
    assert job.state is JobState.CANCELLED
    scene.job(pages=job.target_pages.tolist())


def test_a_failed_chunk_ends_its_job_when_the_others_have_ended() -> None:
    scene = Scene(chunk_pages=1, window_pages=2)
    job = scene.job(pages=3)
    first, second = scene.issue()
    assert scene.end(first, FAULT) == []
    assert scene.issue() == []
    assert not scene.cancel(job)
    assert scene.end(second) == [job]
    assert job.state is JobState.FAILED
    assert str(job.error) == "job 0 (h2d, 3 pages): a chunk failed: the wire broke"
    assert job.error is not None
    assert job.error.__cause__ is FAULT
    counters = scene.core.counters[H2D]
    assert (counters.moved_bytes, counters.lost_bytes) == (PAGE_BYTES, PAGE_BYTES)
    assert (counters.dropped_bytes, counters.failed) == (PAGE_BYTES, 1)


def test_a_chunk_that_fails_after_the_cancel_leaves_the_job_cancelled() -> None:
    scene = Scene()
    job = scene.job()
    (chunk,) = scene.issue()
    scene.cancel(job)
    assert scene.end(chunk, FAULT) == [job]
    assert (job.state, job.error) == (JobState.CANCELLED, None)


def test_a_job_starts_when_all_that_it_waits_for_is_done() -> None:
    scene = Scene()
    first, second = scene.job(D2H), scene.job(D2H)
    heir = scene.job(after=[first, second])
    a, b = scene.issue()
    scene.end(a)
    assert scene.issue() == []
    scene.end(b)
    assert [chunk.job for chunk in scene.issue()] == [heir]
    scene.end(scene.in_flight[0])
    assert states(first, second, heir) == ["done"] * 3
    assert heir.after == ()


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_jobs_whose_room_never_came_fail_down_the_whole_chain(how: str) -> None:
    scene = Scene()
    first = scene.job(D2H)
    second = scene.job(after=[first])
    third = scene.job(D2H, after=[second, first])
    (chunk,) = scene.issue()
    if how == "fails":
        scene.end(chunk, FAULT)
    else:
        scene.cancel(first)
        scene.end(chunk)
    assert scene.ended == [first, second, third]
    assert states(second, third) == ["failed", "failed"]
    assert str(second.error).startswith("job 1 (h2d, 1 pages): its room never came: <job 0: d2h")
    late = scene.job(after=[first])
    assert late.state is JobState.FAILED
    assert scene.ended[-1] is late


def test_a_chain_of_thousands_fails_without_recursion() -> None:
    scene = Scene(num_pages=3000)
    jobs: list[Job] = []
    for page in range(3000):
        jobs.append(Job(H2D, [page], [page], after=jobs[-1:]))
        scene.core.submit(jobs[-1], 0.0)
    assert scene.core.cancel(jobs[0], 0.0)
    assert scene.core.take_ended() == jobs
    assert jobs[-1].state is JobState.FAILED
    scene.core.check_integrity()


def test_done_jobs_do_not_keep_those_before_them_alive() -> None:
    scene = Scene()
    first = scene.job()
    second = scene.job(after=[first])
    assert scene.cancel(first)
    assert second.after == ()


def test_those_that_an_urgent_job_waits_for_go_first_and_pass_the_window() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    others = [scene.job(D2H, pages=3, priority=Priority.URGENT) for _ in range(3)]
    write_back = scene.job(D2H, pages=4, priority=Priority.BACKGROUND)
    assert order(scene.issue()) == [others[0]]
    urgent = scene.job(H2D, after=[write_back], priority=Priority.URGENT)
    started = scene.issue()
    assert [chunk.job for chunk in started] == [write_back] * 4
    for chunk in started:
        scene.end(chunk)
    assert urgent in [chunk.job for chunk in scene.issue()]


def test_urgency_is_handed_down_the_whole_chain_and_by_a_later_raise() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    scene.job(D2H, pages=2)
    first = scene.job(D2H, pages=1, priority=Priority.BACKGROUND)
    second = scene.job(D2H, after=[first], priority=Priority.BACKGROUND)
    third = scene.job(H2D, after=[second], priority=Priority.BACKGROUND)
    assert len(scene.issue()) == 1
    scene.core.raise_priority(third, Priority.URGENT)
    (chunk,) = scene.issue()
    assert chunk.job is first
    scene.end(chunk)
    assert [chunk.job for chunk in scene.issue()] == [second]


def test_a_normal_job_hands_down_its_priority_and_deadline_but_no_way_past_the_window() -> None:
    scene = Scene(chunk_pages=1, window_pages=1)
    scene.job(D2H)
    (in_flight,) = scene.issue()
    plain = scene.job(D2H, priority=Priority.NORMAL, deadline_s=5.0)
    write_back = scene.job(D2H, priority=Priority.BACKGROUND)
    scene.job(H2D, after=[write_back], priority=Priority.NORMAL, deadline_s=1.0)
    assert scene.issue() == []
    scene.end(in_flight)
    assert [job for job in order(scene.run()) if job.direction is D2H] == [write_back, plain]


def test_a_full_device_and_a_full_host_never_deadlock() -> None:
    # Each page up needs the room of a page that goes down, and the other way round.
    scene = Scene(chunk_pages=1, window_pages=1, num_pages=8)
    jobs: list[Job] = []
    for _ in range(6):
        for page in range(8):
            direction = H2D if (len(jobs) // 8) % 2 else D2H
            before = jobs[-8:-7]
            jobs.append(scene.job(direction, [page], after=before))
    scene.run()
    assert {job.state for job in jobs} == {JobState.DONE}


def test_a_chunk_ends_once() -> None:
    scene = Scene()
    scene.job()
    (chunk,) = scene.issue()
    scene.end(chunk)
    with pytest.raises(TransferError, match="not in flight"):
        scene.core.ended(chunk, 0.0)


def test_futures_follow_the_state() -> None:
    scene = Scene(chunk_pages=1)
    done, failed, cancelled = scene.job(), scene.job(), scene.job()
    before = failed.future
    first, second, third = scene.issue()
    scene.cancel(cancelled)
    scene.end(first)
    scene.end(second, FAULT)
    scene.end(third)
    for job in scene.ended:
        job.resolve()
    assert done.future.result() is None
    with pytest.raises(TransferError, match="the wire broke"):
        before.result()
    assert cancelled.future.cancelled()
    with pytest.raises(CancelledError):
        cancelled.future.result()


def test_nobody_cancels_a_job_by_its_future_and_a_timeout_ends_the_waiting_alone() -> None:
    scene = Scene()
    job = scene.job()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job, timeout=0.01)

    assert not job.future.cancel()
    asyncio.run(give_up())
    assert not job.future.done()
    scene.run()
    job.resolve()
    assert job.future.result() is None
