"""The transfer window: bounds, one cut per congestion, as much in flight as pays and no more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.window import TransferWindow

from .windows import CHUNK, LINK, Feeder, link, run, settings

# On a link ---------------------------------------------------------------------------------


def test_a_link_that_one_chunk_keeps_busy_gets_one_chunk_at_a_time() -> None:
    heap = EventHeap()
    feeder = Feeder(heap, link(heap))
    feeder.feed(0.0)
    run(heap, 4.0)
    assert feeder.moved >= 0.99 * 4.0 * LINK
    tries = [size for size in feeder.sizes if size > CHUNK]
    assert 0 < len(tries) < 0.05 * len(feeder.sizes)
    assert feeder.most_in_flight == 2 * CHUNK


def test_tries_stay_out_of_sight_of_a_p99_with_the_defaults() -> None:
    heap = EventHeap()
    feeder = Feeder(heap, link(heap), TransferWindow(settings(probe_windows=1024)))
    feeder.feed(0.0)
    run(heap, 30.0)
    assert sum(size > CHUNK for size in feeder.sizes) < 0.01 * len(feeder.sizes)


@pytest.mark.parametrize("late", [1, 3, 8])
def test_ends_that_become_known_late_are_covered_by_more_chunks(late: int) -> None:
    # 1 ms of copying and `late` ms until it is known: 1 + late chunks fill the link.
    heap = EventHeap()
    window = TransferWindow(settings(probe_windows=1024))
    feeder = Feeder(heap, link(heap), window, notice_s=late * CHUNK / LINK)
    feeder.feed(0.0)
    run(heap, 2.0)
    warm = feeder.moved
    run(heap, 12.0)
    assert feeder.moved - warm >= 0.9 * 10.0 * LINK
    settled = sorted(feeder.sizes[len(feeder.sizes) // 2 :])
    assert settled[len(settled) // 2] <= (late + 2) * CHUNK


def test_a_window_shrinks_when_less_in_flight_does_as_well() -> None:
    heap = EventHeap()
    feeder = Feeder(heap, link(heap), notice_s=8 * CHUNK / LINK)
    feeder.feed(0.0)
    run(heap, 1.0)
    assert feeder.sizes[-1] >= 8 * CHUNK
    feeder.notice_s = 0.0
    run(heap, 5.0)
    late = feeder.sizes[-200:]
    assert sum(late) / len(late) < 1.5 * CHUNK


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_ranks_on_one_link_fill_it_and_none_is_left_out(num_ranks: int) -> None:
    heap = EventHeap()
    host = link(heap, num_ranks)
    feeders = [Feeder(heap, host, rank=rank) for rank in range(num_ranks)]
    for feeder in feeders:
        feeder.feed(0.0)
    run(heap, 4.0)
    moved = [feeder.moved for feeder in feeders]
    assert sum(moved) >= 0.99 * 4.0 * LINK
    assert min(moved) >= 0.9 * sum(moved) / num_ranks


def test_both_directions_at_once_fill_the_link() -> None:
    heap = EventHeap()
    host = link(heap)
    feeders = [Feeder(heap, host, direction=direction) for direction in Direction]
    for feeder in feeders:
        feeder.feed(0.0)
    run(heap, 4.0)
    for feeder in feeders:
        assert feeder.moved >= 0.99 * 4.0 * 0.75 * LINK


def test_a_fixed_window_is_the_bound_it_is_given() -> None:
    heap = EventHeap()
    feeder = Feeder(heap, link(heap), FixedWindow(5 * CHUNK))
    feeder.feed(0.0)
    run(heap, 1.0)
    assert feeder.most_in_flight == 5 * CHUNK


# The law, step by step ---------------------------------------------------------------------


class Hand:
    """A window whose chunks are sent and ended by hand, a chunk a second on the link."""

    def __init__(self, **changed: float) -> None:
        self.window = TransferWindow(settings(**{"epoch_chunks": 2, "growth_epochs": 1, **changed}))
        self.sent_s: list[float] = []
        self.now_s = 0.0

    def fill(self) -> None:
        while self.window.room(self.window.in_flight_bytes) >= CHUNK:
            self.window.sent(CHUNK, self.now_s)
            self.sent_s.append(self.now_s)

    def end(self, num_chunks: int, each_s: float = 1.0) -> None:
        """End so many chunks in turn, and send as many as there is room for."""
        for _ in range(num_chunks):
            self.fill()
            self.now_s += each_s
            self.window.ended(CHUNK, self.sent_s.pop(0), self.now_s)

    @property
    def chunks(self) -> float:
        return self.window.size_bytes / CHUNK


def test_it_starts_with_one_chunk_and_grows_by_one() -> None:
    hand = Hand()
    assert hand.chunks == 1
    hand.end(2)
    assert hand.chunks == 2


def test_growth_that_pays_goes_on_and_growth_that_does_not_is_cut_by_half() -> None:
    hand = Hand()
    hand.end(2)  # one chunk in flight, 1 chunk/s
    hand.end(2 + 2, each_s=0.6)
    assert hand.chunks == 3
    hand.end(3 + 3, each_s=0.4)
    assert hand.chunks == 4
    hand.end(4 + 4, each_s=0.4)
    assert (hand.chunks, hand.window.num_cuts) == (2, 1)


def test_a_cut_is_judged_only_when_the_bytes_in_flight_at_it_have_ended() -> None:
    hand = Hand(max_chunks=8)
    each_s = 1.0
    while hand.chunks < 8:
        each_s *= 0.8
        hand.end(1, each_s)
    while hand.window.num_cuts == 0:
        hand.end(1, 5 * each_s)
    in_flight = hand.window.in_flight_bytes // CHUNK
    assert (hand.chunks, in_flight) == (4, 7)
    hand.end(in_flight, 50 * each_s)
    assert (hand.chunks, hand.window.num_cuts) == (4, 1)


def test_a_size_that_did_not_pay_is_left_alone_for_a_while() -> None:
    hand = Hand(probe_windows=25)
    hand.end(2)
    hand.end(2 + 2)
    assert (hand.chunks, hand.window.num_cuts) == (1, 1)
    hand.end(2 * 25 - 1)
    assert hand.chunks == 1
    hand.end(4)
    assert (hand.chunks, hand.window.num_cuts) == (2, 1)


def test_chunks_of_few_jobs_that_never_fill_the_window_say_nothing_of_it() -> None:
    window = TransferWindow(settings(epoch_chunks=2))
    for index in range(100):
        assert window.room(0) >= CHUNK
        window.sent(CHUNK // 10, float(index))
        window.ended(CHUNK // 10, float(index), index + 0.5)
    assert (window.size_bytes, window.num_cuts) == (CHUNK, 0)


def test_time_without_work_counts_for_no_goodput() -> None:
    steady, idle = Hand(), Hand()
    for _ in range(40):
        steady.end(1)
        idle.end(1)
        if not idle.window.in_flight_bytes:
            idle.now_s += 10.0
    assert steady.window.num_cuts > 0
    assert (idle.chunks, idle.window.num_cuts) == (steady.chunks, steady.window.num_cuts)


def test_a_small_chunk_under_way_does_not_keep_the_next_one_waiting() -> None:
    window = TransferWindow(settings())
    window.sent(CHUNK // 16, 0.0)
    assert window.room(CHUNK // 16) >= CHUNK
    window.sent(CHUNK, 0.0)
    assert window.room(CHUNK // 16 + CHUNK) == 0


def test_a_page_that_waits_behind_a_chunk_is_no_sign_of_a_full_link() -> None:
    window = TransferWindow(settings(epoch_chunks=2, growth_epochs=1))
    page = CHUNK // 16
    for now_s in (0.0, 1.1):
        window.sent(CHUNK, now_s)
        window.sent(page, now_s)
        assert window.room(CHUNK + page) == 0
        window.ended(CHUNK, now_s, now_s + 1.0)
        window.ended(page, now_s, now_s + 1.1)
    assert (window.size_bytes, window.num_cuts) == (2 * CHUNK, 0)


def test_a_size_that_paid_is_looked_into_at_growing_intervals() -> None:
    # Two chunks fill the link: a look halves the window, loses half and confirms it.
    heap = EventHeap()
    window = TransferWindow(settings(probe_windows=1024, max_chunks=2))
    feeder = Feeder(heap, link(heap), window, notice_s=CHUNK / LINK)
    feeder.feed(0.0)
    run(heap, 12.0)
    looks = [
        index
        for index in range(1, len(feeder.sizes))
        if feeder.sizes[index] < feeder.sizes[index - 1]
    ]
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert 4 <= len(looks) <= 12
    assert all(later >= 1.5 * earlier for earlier, later in pairwise(gaps[:4]))
    assert gaps[-1] > 1024


# Laws for any sequence ---------------------------------------------------------------------

SIZES = st.integers(1, CHUNK)
STEPS = st.lists(
    st.tuples(SIZES, st.floats(0.0, 3.0), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=400,
)


@given(STEPS, st.integers(1, 8))
def test_in_flight_stays_within_the_window_and_the_window_within_its_bounds(
    steps: list[tuple[int, float, int, bool]], max_chunks: int
) -> None:
    window = TransferWindow(
        settings(max_chunks=max_chunks, epoch_chunks=2, growth_epochs=1, probe_windows=10)
    )
    flying: list[tuple[int, float]] = []
    now_s, ended, judge_from = 0.0, 0, 0
    for num_bytes, pause_s, pick, passes in steps:
        now_s += pause_s
        in_flight = sum(size for size, _ in flying)
        assert window.in_flight_bytes == in_flight
        if passes or window.room(in_flight) >= num_bytes:
            # Nothing but what passes is ever beyond the window and its slack when it starts.
            assert passes or in_flight + num_bytes <= window.size_bytes + CHUNK // 16
            window.sent(num_bytes, now_s)
            flying.append((num_bytes, now_s))
            continue
        assert in_flight, "an empty window has room for every chunk"
        size, sent_s = flying.pop(pick % len(flying))
        before, cuts = window.size_bytes, window.num_cuts
        now_s += 0.1
        window.ended(size, sent_s, now_s)
        ended += size
        assert window.size_bytes in range(CHUNK, (max_chunks + 1) * CHUNK, CHUNK)
        if window.num_cuts > cuts:
            assert ended >= judge_from, "two cuts for one congestion"
            assert window.size_bytes == max(before // CHUNK // 2, 1) * CHUNK < before
            judge_from = ended + window.in_flight_bytes
        else:
            assert window.size_bytes in (before, before + CHUNK)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_bytes", 0),
        ("max_chunks", 0),
        ("epoch_chunks", 0),
        ("probe_windows", -1),
        ("growth_epochs", 0),
        ("beta", 1.0),
        ("beta", 0.0),
        ("gain", 0.0),
        ("delay_target", float("inf")),
        ("gain", float("nan")),
        ("slack", -0.1),
        ("slack", 1.1),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        settings(**{name: value})


def test_bytes_that_were_never_sent_cannot_end() -> None:
    window = TransferWindow(settings())
    window.sent(1, 0.0)
    with pytest.raises(AssertionError, match="2 bytes ended, 1 were in flight"):
        window.ended(2, 0.0, 1.0)
