"""The engine over a backend that is polled, as one on streams is; injected faults; metrics."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvtier.errors import ConfigError, TransferError
from kvtier.ids import Direction
from kvtier.transfer.backend import Done
from kvtier.transfer.chunks import Geometry
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.faults import FaultyBackend
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Chunk, Job, JobState

from .cores import D2H, H2D

PAGE = 100


class Stream:
    """A polled backend: of each direction, one chunk ends at every other poll."""

    geometry = Geometry(1000, 1000, (PAGE,))
    path_name = "stream"
    polled = True

    def __init__(self) -> None:
        self.started: list[tuple[Chunk, Done]] = []
        self.copied: list[Chunk] = []
        self.num_polls = 0
        self.closed = False

    def start(self, chunk: Chunk, done: Done) -> None:
        self.started.append((chunk, done))

    def poll(self) -> None:
        self.num_polls += 1
        if self.num_polls % 2 or not self.started:
            return
        chunk, done = self.started.pop(0)
        self.copied.append(chunk)
        done(None)

    def close(self) -> None:
        assert not self.started, "closed with chunks in flight"
        self.closed = True


def engine(backend: Stream | FaultyBackend, *, window_pages: int = 4) -> TransferEngine:
    windows = {direction: FixedWindow(window_pages * PAGE) for direction in Direction}
    return TransferEngine(backend, chunk_bytes=2 * PAGE, windows=windows)


def test_polls_move_jobs_on_and_report_each_end_once() -> None:
    backend = Stream()
    with engine(backend) as moving:
        jobs = [moving.submit(H2D, range(at, at + 5), range(at, at + 5)) for at in (0, 10)]
        ended: list[Job] = []
        while len(ended) < 2:
            ended += moving.poll()
        assert ended == jobs
        assert moving.poll() == []
        polls = backend.num_polls
        moving.poll()
        assert backend.num_polls == polls, "an idle poll asks nobody"
    assert backend.closed


def test_waiting_polls() -> None:
    moving = engine(Stream())
    job = moving.submit(D2H, range(9), range(9))
    assert moving.wait([job])
    assert job.future.done()
    assert moving.poll() == [job]
    moving.close()


def test_a_wait_gives_up_in_time_and_draining_goes_on() -> None:
    moving = engine(Stream())
    job = moving.submit(D2H, range(9), range(9))
    assert not moving.wait([job], timeout_s=0.0)
    assert not moving.drain(timeout_s=0.0)
    assert moving.drain()
    assert job.state is JobState.DONE
    moving.close()


def test_an_exception_cancels_what_was_not_started_and_waits_for_the_rest() -> None:
    backend = Stream()
    with pytest.raises(KeyError), engine(backend) as moving:  # noqa: PT012
        jobs = [moving.submit(H2D, range(at, at + 4), range(at, at + 4)) for at in (0, 10)]
        raise KeyError
    assert [job.state for job in jobs] == [JobState.CANCELLED] * 2
    assert len(backend.copied) == 2
    assert backend.closed
    with pytest.raises(TransferError, match="is closed"):
        moving.submit(H2D, [1], [1])


def test_without_reports_polls_return_nothing_and_nothing_piles_up() -> None:
    windows = {direction: FixedWindow() for direction in Direction}
    moving = TransferEngine(Stream(), chunk_bytes=PAGE, windows=windows, reports=False)
    job = moving.submit(H2D, [1], [1])
    while not job.future.done():
        assert moving.poll() == []
    moving.close()


def test_the_reserve_is_one_chunk() -> None:
    with engine(Stream()) as moving:
        assert moving.reserve_bytes == 2 * PAGE


def test_metrics_add_up_and_have_closed_labels() -> None:
    with engine(FaultyBackend(Stream(), failing_chunks=[0])) as moving:
        failing = moving.submit(D2H, range(4), range(4))
        moving.submit(H2D, [7], [7])
        moving.wait([failing])
        moving.drain()
        samples = moving.metrics()
    values = {
        (s.name.removeprefix("kvtier_transfer_"), *dict(s.labels).values()): s for s in samples
    }
    assert all(sample.name.startswith("kvtier_transfer_") for sample in samples)
    assert {dict(s.labels)["path"] for s in samples} == {"stream"}
    assert values["jobs_total", "d2h", "stream", "failed"].value == 1
    assert values["jobs_total", "h2d", "stream", "done"].value == 1
    moved = [
        values["bytes_total", "d2h", "stream", how].value for how in ("moved", "lost", "dropped")
    ]
    assert sum(moved) == 4 * PAGE
    assert values["window_bytes", "h2d", "stream"].value == 4 * PAGE


# --- faults ---


def faults(num_chunks: int, **settings: object) -> tuple[list[int], int]:
    """Which chunks failed, and how many were copied."""
    inner = Stream()
    backend = FaultyBackend(inner, **settings)  # type: ignore[arg-type]
    moving = engine(backend, window_pages=1)
    failed = []
    for number in range(num_chunks):
        job = moving.submit(H2D, [number], [number])
        moving.wait([job])
        if job.state is JobState.FAILED:
            assert f"injected fault in chunk {number}" in str(job.error)
            failed.append(number)
    moving.close()
    assert (backend.num_started, backend.num_failed) == (num_chunks, len(failed))
    return failed, len(inner.copied)


def test_chosen_chunks_fail() -> None:
    assert faults(6, failing_chunks=(1, 4))[0] == [1, 4]


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.3, 40, 80), (1.0, 200, 200)])
def test_chunks_fail_at_the_given_rate_some_of_them_after_the_copy(
    rate: float, least: int, most: int
) -> None:
    failed, num_copied = faults(200, failure_rate=rate, seed=3)
    assert least <= len(failed) <= most
    if failed:
        assert 200 - len(failed) < num_copied < 200


def test_the_same_seed_gives_the_same_faults() -> None:
    first, again = (faults(60, failure_rate=0.3, seed=5) for _ in range(2))
    assert first == again
    assert first != faults(60, failure_rate=0.3, seed=6)


def test_delays_are_drawn_up_to_the_largest() -> None:
    delays: list[float] = []
    faults(50, max_delay_s=0.5, sleep=delays.append)
    assert len(delays) == 50
    assert 0.4 < max(delays) <= 0.5
    assert min(delays) < 0.1


@pytest.mark.parametrize(
    "wrong", [{"failure_rate": 1.1}, {"failure_rate": -0.1}, {"max_delay_s": -1}]
)
def test_faults_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FaultyBackend(Stream(), **wrong)  # type: ignore[arg-type]


def test_ids_of_a_job_are_those_of_its_engine() -> None:
    chosen: Collection[int] = [3]
    with engine(Stream()) as moving:
        jobs = [moving.submit(H2D, chosen, [at]) for at in range(3)]  # type: ignore[arg-type]
        assert [job.id for job in jobs] == [0, 1, 2]
        assert moving.cancel(jobs[2])
        moving.raise_priority(jobs[1], jobs[1].priority)
        moving.check_integrity()
