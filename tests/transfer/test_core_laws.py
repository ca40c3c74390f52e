"""Random lives of many jobs: pages, bytes and jobs add up after every step."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.job import Chunk, Job, JobState, Priority

from .cores import PAGE_BYTES, Scene

STEPS = st.sampled_from(["submit", "submit", "end", "end", "fail", "cancel", "raise", "issue"])


class Lives:
    """A scene with few pages, and what may be said of it whatever happened."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.scene = Scene(chunk_pages=2, window_pages=data.draw(st.integers(1, 6)), num_pages=6)
        self.jobs: list[Job] = []

    def submit(self) -> None:
        draw = self.data.draw
        pages = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)
        source = draw(pages)
        target = draw(st.permutations(range(6)))[: len(source)]
        direction = draw(st.sampled_from(Direction))
        job = Job(
            direction,
            source,
            target,
            priority=draw(st.sampled_from(Priority)),
            deadline_s=draw(st.none() | st.floats(0, 9)),
            after=draw(st.lists(st.sampled_from(self.jobs), max_size=3)) if self.jobs else (),
            layerwise=direction is Direction.H2D and draw(st.booleans()),
        )
        before = str(self.scene.core.counters)
        try:
            self.scene.core.submit(job, self.scene.now_s)
        except TransferError:
            assert str(self.scene.core.counters) == before
            assert self.clashes(job)
        else:
            self.jobs.append(job)
            self.scene.ended += self.scene.core.take_ended()

    def clashes(self, job: Job) -> bool:
        """Whether a live job has a page of it, other than to read it as well."""
        for other in self.live():
            same = other.direction is job.direction
            theirs = {*other.source_pages.tolist()}, {*other.target_pages.tolist()}
            reads, writes = theirs if same else theirs[::-1]
            if writes & {*job.target_pages.tolist()} or reads & {*job.target_pages.tolist()}:
                return True
            if not same and reads & {*job.source_pages.tolist()}:
                return True
            if not same and writes & {*job.source_pages.tolist()}:
                return True
        return False

    def live(self) -> list[Job]:
        return [job for job in self.jobs if not job.state.ended]

    def step(self, name: str) -> None:
        scene, draw = self.scene, self.data.draw
        scene.now_s += 1.0
        if name == "submit":
            self.submit()
        elif name == "issue":
            self.check_started(scene.issue())
        elif name in ("end", "fail") and scene.in_flight:
            chunk = draw(st.sampled_from(scene.in_flight))
            scene.end(chunk, OSError("lost") if name == "fail" else None)
        elif name == "cancel" and self.jobs:
            scene.cancel(draw(st.sampled_from(self.jobs)))
        elif name == "raise" and self.jobs:
            scene.core.raise_priority(draw(st.sampled_from(self.jobs)), Priority.URGENT)
        scene.core.check_integrity()
        self.check_pages_in_flight()

    def check_started(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.job.state is JobState.IN_FLIGHT
            assert not [other for other in chunk.job.after if other.state is not JobState.DONE]

    def check_pages_in_flight(self) -> None:
        """Law 2: what a copy writes no other job touches, and only live jobs have copies."""
        writers: Counter[tuple[bool, int]] = Counter()
        readers: set[tuple[bool, int]] = set()
        for job in {chunk.job for chunk in self.scene.in_flight}:
            assert job.state is JobState.IN_FLIGHT
            down = job.direction is Direction.D2H
            writers.update((down, page) for page in job.target_pages.tolist())
            readers |= {(not down, page) for page in job.source_pages.tolist()}
        assert all(count == 1 for count in writers.values())
        assert not readers & writers.keys()

    def finish(self) -> None:
        self.scene.run()
        assert self.live() == []
        assert Counter(map(id, self.scene.ended)) == Counter(map(id, self.jobs))
        for direction, counters in self.scene.core.counters.items():
            mine = [job for job in self.jobs if job.direction is direction]
            done = [job for job in mine if job.state is JobState.DONE]
            assert counters.issued == len(mine)
            assert counters.done == len(done)
            assert (counters.live, counters.queued_bytes, counters.in_flight_bytes) == (0, 0, 0)
            assert counters.moved_bytes >= sum(job.num_pages for job in done) * PAGE_BYTES
            assert all(job.pages_done == job.num_pages for job in done)


@settings(max_examples=150)
@given(st.data(), st.lists(STEPS, min_size=5, max_size=60))
def test_whatever_happens_all_jobs_end_once_and_nothing_is_lost(
    data: st.DataObject, steps: list[str]
) -> None:
    lives = Lives(data)
    for step in steps:
        lives.step(step)
    lives.finish()
