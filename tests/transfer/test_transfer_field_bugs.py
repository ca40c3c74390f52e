"""Situations from public bug reports on KV offloading, by their numbers in the list of them."""

from __future__ import annotations

from random import Random
from threading import Event

import pytest

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.job import Job, JobState, Priority

from .engines import Scene, scene
from .scene import Bytes, pattern, take

D2H, H2D = Direction.D2H, Direction.H2D


class Written:
    """Compute that writes pages, and the event that says it is over."""

    def __init__(self, scene: Scene, pages: list[int], owner: int, generation: int) -> None:
        self.scene, self.pages = scene, pages
        self.content = pattern(owner, generation, len(pages))
        self._over = Event()

    def finish(self) -> None:
        self.scene.pools.device.write(self.pages, self.content)
        self._over.set()

    def wait(self) -> None:
        assert self._over.wait(30), "the writer never came to its end"


class Broken:
    """Compute that never writes what it should."""

    def wait(self) -> None:
        raise RuntimeError("the kernel was not launched")


def give_up(scene: Scene, jobs: list[Job]) -> None:
    """Whoever asked for the jobs is gone: all of their pages go back, once the engine is done."""
    for job in jobs:
        scene.pools.source(job.direction).pages.give(job.source_pages)
        scene.pools.target(job.direction).pages.give(job.target_pages)


# --- B01, B02: an abort gives everything back ---


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("let", [None, 0, 1, 3, 4])
def test_b02_an_abort_in_each_state_returns_every_counter(
    direction: Direction, let: int | None
) -> None:
    """Let: chunks that end before the abort; None: it waits for another job; 4: all of them."""
    with scene(chunk_pages=1, window_pages=2) as s:
        blocker, _ = s.copy(direction, 1)
        job, _ = s.copy(direction, 4, after=[blocker] if let is None else [])
        s.gate.let(*([] if let is None else [0]))
        for _ in range(let or 0):
            s.gate.let(0)
        live = not job.state.ended
        assert s.engine.cancel(job) is live
        s.let_all()
        assert job.state is (JobState.CANCELLED if live else JobState.DONE)
        give_up(s, [job, blocker])
        for gauge in ("live_jobs", "queued_bytes", "in_flight_bytes"):
            assert s.metric(gauge, direction) == 0
        assert s.pools.device.pages.num_taken == s.pools.host.pages.num_taken == 0
        again, content = s.copy(direction, 16)
        s.let_all()
        assert (s.arrived(again) == content).all()


def test_b01_two_hundred_loads_aborted_at_random_leave_room_for_two_hundred_more() -> None:
    choose = Random(1)
    with scene(device_pages=8, host_pages=8, chunk_pages=1, window_pages=3) as s:
        for _ in range(200):
            job, content = s.copy(H2D, choose.randrange(1, 9), layerwise=choose.random() < 0.5)
            for _ in range(choose.randrange(10)):
                if s.gate.waiting:
                    s.gate.let(choose.randrange(len(s.gate.waiting)))
            s.engine.cancel(job)
            s.let_all()
            assert job.state.ended
            assert job.state is not JobState.DONE or (s.arrived(job) == content).all()
            give_up(s, [job])
            assert s.pools.host.pages.num_free == s.pools.device.pages.num_free == 8
        job, content = s.copy(H2D, 8)
        s.let_all()
        assert (s.arrived(job) == content).all()


def test_a_cancelled_job_keeps_its_pages_until_its_last_chunk_has_ended() -> None:
    with scene(window_pages=2) as s:
        job, _ = s.copy(H2D, 4)
        s.engine.cancel(job)
        assert job.state is JobState.IN_FLIGHT
        other, _ = s.fill(H2D, 1)
        for _ in range(2):
            assert not job.future.done()
            with pytest.raises(TransferError, match="device page"):
                s.engine.submit(H2D, other, job.target_pages[3:])
            s.gate.let(0)
        assert job.state is JobState.CANCELLED
        assert not s.gate.waiting
        s.engine.submit(H2D, other, job.target_pages[3:])
        s.let_all()


# --- B20: an urgent page does not wait for a burst ---


@pytest.mark.parametrize("priority", [Priority.URGENT, Priority.NORMAL])
def test_b20_a_page_behind_four_thousand_waits_for_what_is_in_flight_alone(
    priority: Priority,
) -> None:
    with scene(4008, 4008, chunk_pages=8, window_pages=16) as s:
        burst, burst_content = s.copy(H2D, 4000, priority=Priority.NORMAL)
        page, content = s.copy(H2D, 1, priority=priority)
        in_flight = len(s.gate.waiting)
        assert in_flight == 2
        for _ in range(in_flight + 1):
            s.gate.let(0)
        assert page.state is JobState.DONE
        assert burst.pages_done < 4 * 8
        assert (s.arrived(page) == content).all()
        s.gate.open_wide()
        assert s.engine.wait([burst], 60)
        assert (s.arrived(burst) == burst_content).all()


# --- full tiers, and copies up that wait for copies down ---


def test_a_full_device_and_a_full_host_swap_by_the_reserve_alone() -> None:
    """Each tier has one chunk in reserve; what is in HBM and what is in DRAM change places."""
    with scene(9, 9, window_pages=1) as s:
        filled = [(s.fill(D2H, 1), s.fill(H2D, 1)) for _ in range(8)]
        device_room, host_room = take(s.pools.device, 1), take(s.pools.host, 1)
        moved: list[tuple[Job, Bytes]] = []
        for (device_page, down_content), (host_page, up_content) in filled:
            named = [job for job, _ in moved[-2:]]
            down = s.engine.submit(D2H, device_page, host_room, after=named)
            up = s.engine.submit(H2D, host_page, device_room, after=named)
            device_room, host_room = device_page, host_page
            moved += [(down, down_content), (up, up_content)]
        s.let_all()
        for job, content in moved:
            assert job.state is JobState.DONE
            assert (s.arrived(job) == content).all()


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_full_tiers_never_deadlock_though_copies_fail(rate: float) -> None:
    choose = Random(2)
    with scene(4, 4, window_pages=1, failure_rate=rate, seed=3) as s:
        for _ in range(100):
            victim, content = s.fill(D2H, 3)
            wanted, up_content = s.fill(H2D, 1)
            room = take(s.pools.host, 3)
            down = s.engine.submit(D2H, victim, room, priority=Priority.BACKGROUND)
            up = s.engine.submit(
                H2D, wanted, victim[:1], priority=choose.choice([*Priority]), after=[down]
            )
            s.let_all()
            assert down.state.ended
            assert up.state.ended
            if down.state is JobState.DONE:
                assert (s.arrived(down) == content).all()
            else:
                assert up.state is JobState.FAILED
                assert (s.pools.device.read(victim) == content).all()
            if up.state is JobState.DONE:
                assert (s.arrived(up) == up_content).all()
            for side, pages in ((s.pools.device, victim), (s.pools.host, [*room, *wanted])):
                side.pages.give(pages)


def test_a_copy_up_is_not_held_behind_the_write_backs_that_make_its_room() -> None:
    """The window of the way down is full of others' write-backs, with more of them in the queue."""
    with scene(window_pages=2) as s:
        others = [s.copy(D2H, 2, priority=Priority.BACKGROUND)[0] for _ in range(3)]
        victim, _ = s.fill(D2H, 2)
        room = take(s.pools.host, 2)
        down = s.engine.submit(D2H, victim, room, priority=Priority.BACKGROUND)
        wanted, content = s.fill(H2D, 2)
        assert {chunk.job for chunk, _ in s.gate.waiting} == {others[0]}
        up = s.engine.submit(H2D, wanted, victim, priority=Priority.URGENT, after=[down])
        waiting = [chunk.job for chunk, _ in s.gate.waiting]
        assert waiting.count(down) == 2
        for _ in range(2):
            s.gate.let([chunk.job for chunk, _ in s.gate.waiting].index(down))
        assert down.state is JobState.DONE
        for _ in range(2):
            s.gate.let([chunk.job for chunk, _ in s.gate.waiting].index(up))
        assert up.state is JobState.DONE
        assert (s.arrived(up) == content).all()
        assert all(other.pages_done == 0 for other in others)
        s.let_all()


def test_urgency_reaches_through_a_chain_of_write_backs() -> None:
    with scene(window_pages=1) as s:
        first_chunk, _ = s.copy(D2H, 1, priority=Priority.BACKGROUND)
        far, _ = s.copy(D2H, 1, priority=Priority.BACKGROUND)
        near, _ = s.copy(D2H, 1, priority=Priority.BACKGROUND, after=[far])
        s.copy(D2H, 4, priority=Priority.NORMAL)
        s.copy(H2D, 1, priority=Priority.URGENT, after=[near])
        order = [first_chunk]
        while near.state is not JobState.DONE:
            at = [chunk.job for chunk, _ in s.gate.waiting].index(
                far if far.state is not JobState.DONE else near
            )
            order.append(s.gate.waiting[at][0].job)
            s.gate.let(at)
        assert order == [first_chunk, far, near]
        s.let_all()


# --- B12, B24, B27: order against compute, and of jobs on the same pages ---


def test_b12_jobs_on_the_same_pages_are_refused_or_ordered() -> None:
    with scene(window_pages=1) as s:
        down, content = s.copy(D2H, 2)
        written, up_content = s.fill(H2D, 2)
        for after in ([], [s.copy(D2H, 1)[0]]):
            with pytest.raises(TransferError, match="device page"):
                s.engine.submit(H2D, written, down.source_pages, after=after)
        ordered = s.engine.submit(H2D, written, down.source_pages, after=[down])
        read_back = s.engine.submit(H2D, down.target_pages, take(s.pools.device, 2), after=[down])
        starts: list[Job] = []
        while s.gate.waiting:
            starts.append(s.gate.waiting[0][0].job)
            s.gate.let(0)
        assert max(at for at, job in enumerate(starts) if job is down) < starts.index(ordered)
        assert (s.arrived(down) == content).all()
        assert (s.arrived(ordered) == up_content).all()
        assert (s.arrived(read_back) == content).all()


def test_b12_order_reaches_through_the_jobs_between() -> None:
    with scene(window_pages=1) as s:
        down, content = s.copy(D2H, 2)
        between = s.copy(D2H, 1, after=[down])[0]
        wanted, up_content = s.fill(H2D, 2)
        up = s.engine.submit(H2D, wanted, down.source_pages, after=[between])
        s.let_all()
        assert (s.arrived(down) == content).all()
        assert (s.arrived(up) == up_content).all()


def test_b12_naming_a_job_twice_orders_it_once() -> None:
    """What is named twice must not hide a third job on the same page."""
    with scene() as s:
        down, _ = s.copy(D2H, 1)
        reader = s.engine.submit(D2H, down.source_pages, take(s.pools.host, 1))
        wanted, content = s.fill(H2D, 1)
        with pytest.raises(TransferError, match="device page"):
            s.engine.submit(H2D, wanted, down.source_pages, after=[down, down])
        up = s.engine.submit(H2D, wanted, down.source_pages, after=[down, reader, down])
        s.let_all()
        assert (s.arrived(up) == content).all()


def test_b12_a_copy_down_waits_for_the_write_of_its_pages() -> None:
    with scene(gated=False) as s:
        pages = take(s.pools.device, 3)
        compute = Written(s, pages, owner=7, generation=1)
        job = s.engine.submit(D2H, pages, take(s.pools.host, 3), ready=compute)
        assert not s.engine.wait([job], 0.05)
        compute.finish()
        assert s.engine.wait([job], 30)
        assert (s.arrived(job) == compute.content).all()


def test_b12_a_write_that_never_comes_fails_the_copy_and_no_other() -> None:
    with scene(gated=False) as s:
        before = s.pools.host.read(range(16))
        broken, _ = s.copy(D2H, 3, ready=Broken())
        good, content = s.copy(D2H, 2)
        assert s.engine.wait([broken, good], 30)
        assert broken.state is JobState.FAILED
        assert "not launched" in str(broken.error)
        assert (s.arrived(good) == content).all()
        untouched = [p for p in range(16) if p not in good.target_pages.tolist()]
        assert (s.pools.host.read(untouched) == before[untouched]).all()


@pytest.mark.parametrize("let", [0, 1, 2, 3])
def test_b24_resumed_during_copy_out_the_last_write_wins(let: int) -> None:
    """Paused, its copy down under way, resumed at once: cancelled, written on, paused again."""
    with scene(window_pages=2) as s:
        out, _ = s.copy(D2H, 3)
        for _ in range(let):
            s.gate.let(0)
        s.engine.cancel(out)
        s.let_all()
        assert out.state.ended
        pages = out.source_pages.tolist()
        written = pattern(9, let, 3)
        s.pools.device.write(pages, written)
        again = s.engine.submit(D2H, pages, out.target_pages)
        s.let_all()
        back = s.engine.submit(H2D, again.target_pages, pages)
        s.pools.device.write(take(s.pools.device, 1), pattern(9, 9, 1))
        s.let_all()
        assert back.state is JobState.DONE
        assert (s.arrived(back) == written).all()


def test_b24_resumed_without_a_cancel_it_waits_and_comes_back() -> None:
    with scene(window_pages=1) as s:
        out, content = s.copy(D2H, 3, priority=Priority.BACKGROUND)
        back = s.engine.submit(
            H2D, out.target_pages, out.source_pages, priority=Priority.URGENT, after=[out]
        )
        s.let_all()
        assert out.state is back.state is JobState.DONE
        assert (s.arrived(back) == content).all()


def test_b27_every_read_sees_its_own_pattern_with_the_host_ahead_of_the_device() -> None:
    """Copies are asked for before the device has written what they copy, and pages are reused."""
    choose = Random(27)
    with scene(6, 12, gated=False, chunk_pages=2) as s:
        for generation in range(150):
            owners = choose.sample(range(100), 2)
            pages = [take(s.pools.device, 3) for _ in owners]
            computed = [Written(s, p, o, generation) for p, o in zip(pages, owners, strict=True)]
            down = [s.engine.submit(D2H, c.pages, take(s.pools.host, 3), ready=c) for c in computed]
            order = choose.sample(range(2), 2)
            up = [
                s.engine.submit(
                    H2D,
                    down[at].target_pages,
                    pages[1 - at],
                    after=down,
                    layerwise=choose.random() < 0.5,
                )
                for at in order
            ]
            for compute in computed:
                compute.finish()
            assert s.engine.wait(up, 30)
            for at, job in zip(order, up, strict=True):
                assert (s.arrived(down[at]) == computed[at].content).all()
                assert (s.arrived(job) == computed[at].content).all()
            give_up(s, down)


# --- faults of single chunks ---


@pytest.mark.parametrize("number", range(4))
def test_a_job_with_one_bad_chunk_fails_and_the_next_one_is_whole(number: int) -> None:
    with scene(window_pages=2, failing_chunks=[number]) as s:
        job, _ = s.copy(H2D, 4)
        s.let_all()
        assert job.state is JobState.FAILED
        assert isinstance(job.error, TransferError)
        assert "\n" not in str(job.error)
        again = s.engine.submit(H2D, job.source_pages, job.target_pages)
        s.let_all()
        content = s.pools.host.read(job.source_pages.tolist())
        assert again.state is JobState.DONE
        assert (s.arrived(again) == content).all()


def test_with_every_chunk_failing_every_job_ends() -> None:
    with scene(32, 32, gated=False, failure_rate=1.0) as s:
        jobs = [s.copy(way, 2)[0] for way in Direction for _ in range(4)]
        late = s.copy(H2D, 1, after=jobs[:4])[0]
        assert s.engine.wait([*jobs, late], 30)
        assert {job.state for job in [*jobs, late]} == {JobState.FAILED}
