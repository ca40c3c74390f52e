"""Many threads at one engine, and closing it with work left."""

from __future__ import annotations

from collections import Counter
from random import Random
from threading import Lock, Thread

import pytest

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.job import Job, JobState, Priority

from .engines import LONG_S, in_threads, scene
from .scene import Side, pattern, take

D2H, H2D = Direction.D2H, Direction.H2D


# --- many threads ---


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3])
def test_threads_that_copy_cancel_and_wait_at_once_lose_nothing(rate: float) -> None:
    with scene(48, 48, gated=False, chunk_pages=2, window_pages=4, failure_rate=rate) as s:
        room, counted = Lock(), Counter[JobState]()

        def locked_take(side: Side, num_pages: int) -> list[int]:
            with room:
                return take(side, num_pages)

        def work(number: int) -> None:
            choose = Random(number)
            for generation in range(60):
                size = choose.randrange(1, 6)
                pages, host = (locked_take(x, size) for x in (s.pools.device, s.pools.host))
                content = pattern(number, generation, size)
                s.pools.device.write(pages, content)
                priority = choose.choice([*Priority])
                out = s.engine.submit(D2H, pages, host, priority=priority)
                back = s.engine.submit(H2D, host, pages, after=[out], layerwise=size > 2)
                if choose.random() < 0.3:
                    s.engine.cancel(choose.choice([out, back]))
                assert s.engine.wait([out, back], LONG_S)
                if out.state is JobState.DONE:
                    assert (s.arrived(out) == content).all()
                if back.state is JobState.DONE:
                    assert (s.arrived(back) == content).all()
                with room:
                    counted.update([out.state, back.state])
                    s.pools.device.pages.give(pages)
                    s.pools.host.pages.give(host)

        in_threads(4, work)
        assert counted.total() == 2 * 4 * 60
        assert s.pools.device.pages.num_free == s.pools.host.pages.num_free == 48
        for outcome in ("done", "failed", "cancelled"):
            told = sum(s.metric("jobs_total", way, outcome) for way in Direction)
            assert told == counted[JobState(outcome)]
        assert {JobState.DONE, JobState.CANCELLED} <= set(counted)
        assert (counted[JobState.FAILED] > 0) or not rate


def test_threads_that_poll_share_the_ends_among_them() -> None:
    with scene(128, 128, gated=False) as s:
        jobs = [s.copy(way, 2)[0] for _ in range(32) for way in Direction]
        polled: list[list[Job]] = [[] for _ in range(4)]

        def poll(number: int) -> None:
            while sum(map(len, polled)) < len(jobs):
                polled[number] += s.engine.poll()

        in_threads(4, poll)
        assert sorted(job.id for found in polled for job in found) == [job.id for job in jobs]


# --- closing ---


def test_close_cancels_what_waits_and_lets_what_is_in_flight_end() -> None:
    with scene(window_pages=2) as s:
        begun, _ = s.copy(H2D, 3)
        waiting, _ = s.copy(H2D, 1)
        closer = Thread(target=s.engine.close)
        closer.start()
        assert begun.future.done() is False
        closer.join(0.05)
        assert closer.is_alive()
        s.let_all()
        closer.join(LONG_S)
        assert not closer.is_alive()
        assert begun.state is waiting.state is JobState.CANCELLED
        assert begun.future.done()
        assert waiting.future.done()
        assert set(s.engine.poll()) == {begun, waiting}
        s.engine.close()


def test_a_block_left_normally_waits_for_all_jobs() -> None:
    with scene(gated=False, max_delay_s=0.002) as s:
        with s.engine:
            jobs = [s.copy(way, 3) for way in Direction]
        for job, content in jobs:
            assert job.future.result(0) is None
            assert (s.arrived(job) == content).all()


def test_a_block_left_by_an_error_waits_only_for_what_is_in_flight() -> None:
    with scene(gated=False, window_pages=1, max_delay_s=0.02) as s:
        job, _ = s.copy(H2D, 16)

        def fail() -> None:
            with s.engine:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert job.state is JobState.CANCELLED
        assert job.pages_done < 16


def test_several_threads_close_while_others_submit() -> None:
    with scene(64, 64, gated=False, window_pages=2, max_delay_s=0.001) as s:
        plan = [(take(s.pools.device, 2), take(s.pools.host, 2)) for _ in range(32)]
        accepted: list[Job] = []
        refused: list[str] = []

        def work(number: int) -> None:
            if number == 0:
                s.engine.close()
            for device, host in plan[number * 8 : number * 8 + 8]:
                try:
                    accepted.append(s.engine.submit(D2H, device, host))
                except TransferError as error:
                    refused.append(str(error))
            s.engine.close()

        in_threads(4, work)
        assert len(accepted) + len(refused) == len(plan)
        assert all("closed" in message for message in refused)
        assert all(job.future.done() for job in accepted)
