"""Ends of jobs as threads and asyncio see them."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, as_completed
from threading import Event, Thread

import pytest

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.job import Job, JobState, Priority

from .engines import LONG_S, Scene, in_threads, scene
from .scene import Bytes, take

D2H, H2D = Direction.D2H, Direction.H2D


# --- one end, seen from everywhere ---


@pytest.mark.parametrize("direction", Direction)
def test_every_thread_that_waits_sees_the_bytes(direction: Direction) -> None:
    with scene() as s:
        job, content = s.copy(direction, 5)
        seen: list[Bytes] = []

        def wait(number: int) -> None:
            if number == 0:
                s.let_all()
            assert job.future.result(LONG_S) is None
            seen.append(s.arrived(job))

        in_threads(6, wait)
        assert len(seen) == 6
        assert all((found == content).all() for found in seen)


def test_a_future_asked_for_after_the_end_says_the_same() -> None:
    with scene(failing_chunks=[1]) as s:
        done, failed, cancelled = (s.copy(H2D, 1)[0] for _ in range(3))
        s.engine.cancel(cancelled)
        s.let_all()
        assert done.future.result(0) is None
        with pytest.raises(TransferError) as raised:
            failed.future.result(0)
        assert raised.value is failed.error
        with pytest.raises(CancelledError):
            cancelled.future.result(0)
        assert cancelled.future.cancelled()


def test_nobody_can_end_a_job_through_its_future() -> None:
    """Its pages would be reused under the copy."""
    with scene() as s:
        job, content = s.copy(H2D, 2)
        assert job.future.cancel() is False
        assert not job.future.done()
        s.let_all()
        assert job.future.result(0) is None
        assert (s.arrived(job) == content).all()


def test_as_completed_hands_out_each_future_once() -> None:
    with scene(32, 32, gated=False, failure_rate=0.3, seed=5) as s:
        jobs = [s.copy(way, 2)[0] for _ in range(8) for way in Direction]
        s.engine.cancel(jobs[-1])
        ended = list(as_completed([job.future for job in jobs], LONG_S))
        assert len(ended) == len(jobs)
        assert all(job.state.ended for job in jobs)


def test_a_callback_may_submit_the_next_job() -> None:
    with scene(gated=False) as s:
        first, content = s.copy(D2H, 2)
        back: list[Job] = []
        over = Event()

        def fetch(_: object) -> None:
            target = take(s.pools.device, 2)
            back.append(s.engine.submit(H2D, first.target_pages, target))
            back[0].future.add_done_callback(lambda _: over.set())

        first.future.add_done_callback(fetch)
        assert over.wait(LONG_S)
        assert (s.arrived(back[0]) == content).all()


@pytest.mark.filterwarnings("default")
def test_a_callback_that_raises_takes_nothing_with_it() -> None:
    with scene(gated=False) as s:
        first, _ = s.copy(D2H, 2)

        def fail(_: object) -> None:
            raise RuntimeError("not the engine's")

        first.future.add_done_callback(fail)
        second, content = s.copy(D2H, 2)
        assert s.engine.wait([first, second], LONG_S)
        assert (s.arrived(second) == content).all()


def test_an_interrupt_while_a_chunk_starts_loses_no_end_and_no_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in the thread that cancels one job and, since that makes room, starts another."""
    with scene(chunk_pages=2, window_pages=2) as s:
        s.copy(H2D, 1)
        large, _ = s.copy(H2D, 2, priority=Priority.URGENT)
        small, content = s.copy(H2D, 1, priority=Priority.BACKGROUND)
        with monkeypatch.context() as patched:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(s.gate, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.engine.cancel(large)
        s.let_all()
        s.copy(H2D, 1)
        s.let_all()
        assert large.future.cancelled()
        assert small.future.result(0) is None
        assert (s.arrived(small) == content).all()


def test_wait_says_whether_the_time_was_enough() -> None:
    with scene() as s:
        job, _ = s.copy(H2D, 2)
        assert s.engine.wait([job], 0.01) is False
        assert s.engine.wait([], 0) is True
        s.let_all()
        assert s.engine.wait([job, job], 0) is True


def test_poll_reports_each_end_once_whoever_waits_for_it() -> None:
    with scene(failing_chunks=[0]) as s:
        jobs = [s.copy(H2D, 1)[0] for _ in range(3)]
        assert s.engine.poll() == []
        s.engine.cancel(jobs[2])
        s.let_all()
        assert s.engine.wait(jobs, 0)
        assert set(s.engine.poll()) == set(jobs)
        assert s.engine.poll() == []


# --- asyncio ---


def test_a_job_can_be_awaited() -> None:
    async def main(s: Scene) -> None:
        jobs = [s.copy(way, 2) for way in Direction]
        await asyncio.gather(*(job for job, _ in jobs))
        for job, content in jobs:
            assert (s.arrived(job) == content).all()
            await job
            await asyncio.wrap_future(job.future)

    with scene(gated=False) as s:
        asyncio.run(main(s))


def test_awaiting_a_job_that_fails_raises_its_error() -> None:
    async def main(s: Scene) -> None:
        job, _ = s.copy(H2D, 2)
        with pytest.raises(TransferError, match=r"^[^\n]+$") as raised:
            await job
        assert raised.value is job.error

    with scene(gated=False, failure_rate=1.0) as s:
        asyncio.run(main(s))


def test_a_time_out_in_asyncio_ends_the_waiting_and_not_the_job() -> None:
    async def main(s: Scene) -> tuple[Job, Bytes]:
        job, content = s.copy(H2D, 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await job
        waiting = asyncio.ensure_future(asyncio.wrap_future(job.future))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert job.state is JobState.IN_FLIGHT
        await asyncio.to_thread(s.let_all)
        await job
        return job, content

    with scene() as s:
        job, content = asyncio.run(main(s))
        assert (s.arrived(job) == content).all()


def test_a_loop_that_closed_while_it_waited_does_no_harm() -> None:
    async def main(s: Scene) -> Job:
        job, _ = s.copy(H2D, 1)
        waiting = asyncio.ensure_future(asyncio.wrap_future(job.future))
        await asyncio.sleep(0)
        waiting.cancel()
        return job

    with scene() as s:
        job = asyncio.run(main(s))
        s.let_all()
        assert job.future.result(0) is None


def test_loops_in_several_threads_await_the_same_jobs() -> None:
    with scene(32, 32, gated=False, chunk_pages=2, max_delay_s=0.001) as s:
        jobs = [s.copy(way, 3) for way in Direction for _ in range(4)]

        async def main() -> None:
            await asyncio.gather(*(job for job, _ in jobs))
            for job, content in jobs:
                assert (s.arrived(job) == content).all()

        in_threads(4, lambda _: asyncio.run(main()))


# --- layers ---


def test_layers_are_there_before_the_whole_job() -> None:
    with scene() as s:
        job, content = s.copy(H2D, 1, layerwise=True)
        layers = job.layers
        assert layers is not None
        assert not layers.wait_layer(0, 0)
        while not job.state.ended:
            s.gate.let(0)
        assert all(layers.wait_layer(layer, 0) for layer in range(3))
        assert (s.arrived(job) == content).all()


def test_a_thread_that_computes_layer_after_layer_reads_what_has_come() -> None:
    with scene(gated=False, chunk_pages=2, max_delay_s=0.002) as s:
        job, content = s.copy(H2D, 7, layerwise=True)
        assert job.layers is not None
        begin = 0
        for layer, width in enumerate((64, 7, 66)):
            assert job.layers.wait_layer(layer, LONG_S)
            columns = slice(begin, begin + width)
            assert (s.arrived(job)[:, columns] == content[:, columns]).all()
            begin += width
        assert s.engine.wait([job], LONG_S)


def test_a_layer_that_came_is_taken_back_where_the_job_fails() -> None:
    """Law 4: nothing of it is published."""
    with scene(failing_chunks=[1], window_pages=1) as s:
        job, _ = s.copy(H2D, 2, layerwise=True)
        assert job.layers is not None
        s.gate.let(0)
        assert job.layers.layer_ready(0)
        s.let_all()
        assert job.state is JobState.FAILED
        assert not job.layers.layer_ready(0)
        with pytest.raises(TransferError, match=r"^layer 0 [^\n]+$"):
            job.layers.wait_layer(0, 0)


def test_a_layer_that_never_comes_is_an_error_and_no_endless_wait() -> None:
    with scene(failing_chunks=[1], window_pages=1) as s:
        failed, _ = s.copy(H2D, 2, layerwise=True)
        cancelled, _ = s.copy(H2D, 2, layerwise=True)
        s.engine.cancel(cancelled)
        seen: list[str] = []

        def wait(job: Job) -> None:
            assert job.layers is not None
            try:
                job.layers.wait_layer(2, LONG_S)
            except TransferError as error:
                seen.append(str(error))

        threads = [Thread(target=wait, args=[job]) for job in (failed, cancelled)]
        for thread in threads:
            thread.start()
        s.let_all()
        for thread in threads:
            thread.join(LONG_S)
        assert len(seen) == 2
        assert all(message.startswith("layer 2 ") for message in seen)
        assert all("\n" not in message for message in seen)
