"""Copies over the host link: published speeds, order, sharing, and conservation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap
from kvtier.transfer.link import CopyPath, HostLink, LinkSpec, copy_bytes_per_s, max_min

D2H, H2D = Direction.D2H, Direction.H2D
KIB = 1024
LINK = 50e9
# vLLM #42212, H100: host-to-device GB/s by descriptor size, at 10,000 and 100,000 descriptors.
BATCHED = {4: (6.8, 3.8), 8: (6.8, 5.3), 16: (7.1, 6.3), 24: (25.8, 6.9), 28: (27.5, 44.1)}


def speed(
    path: CopyPath, direction: Direction, kib: float, count: int, link: float = LINK
) -> float:
    return copy_bytes_per_s(path, direction, int(kib * KIB), count, link)


class World:
    """A link, and when each of its copies arrived."""

    def __init__(
        self,
        one_way: float = 100.0,
        duplex: float = 150.0,
        *,
        path: CopyPath = CopyPath.STAGED,
        fragment: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.heap = EventHeap()
        self.link = HostLink(self.heap, LinkSpec(path, fragment, one_way, duplex), num_ranks)
        self.one_way = speed(path, D2H, 64, 1, one_way)
        self.arrived: list[tuple[str, float]] = []

    def submit_at(
        self, at_s: float, direction: Direction, num_bytes: int, name: str, rank: int = 0
    ) -> None:
        def submit(now_s: float) -> None:
            del now_s
            self.link.submit(
                direction, num_bytes, lambda t: self.arrived.append((name, t)), rank=rank
            )

        self.heap.at(at_s, submit)

    def run(self) -> dict[str, float]:
        while self.heap.step(float("inf")):
            pass
        names = [name for name, _ in self.arrived]
        assert len(names) == len(set(names)), f"one copy arrived twice: {names}"
        return dict(self.arrived)


# Speeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kib", BATCHED)
def test_batched_loads_run_at_the_published_speeds(kib: int) -> None:
    few, many = BATCHED[kib]
    assert speed(CopyPath.BATCH_DMA, H2D, kib, 10_000) == pytest.approx(few * 1e9)
    assert speed(CopyPath.BATCH_DMA, H2D, kib, 100_000) == pytest.approx(many * 1e9)


def test_batched_loads_fall_off_a_cliff_below_28_kib_when_they_are_many() -> None:
    at, below = (speed(CopyPath.BATCH_DMA, H2D, kib, 100_000) for kib in (28, 24))
    assert at > 6 * below


def test_batched_stores_stay_at_link_speed_whatever_the_fragment() -> None:
    assert {speed(CopyPath.BATCH_DMA, D2H, kib, 100_000) for kib in (1, 16, 64)} == {LINK}


def test_a_staged_copy_is_within_a_few_percent_of_the_link_for_any_fragment() -> None:
    for kib in (1, 16, 64):
        for direction in Direction:
            assert 0.95 * LINK < speed(CopyPath.STAGED, direction, kib, 1_000) < LINK


@pytest.mark.parametrize(
    ("kib", "gb_per_s"), [(0.25, 0.11), (2, 0.9), (16, 7.0), (64, 28.0), (256, 50.0), (1024, 50.0)]
)
def test_copies_of_one_page_each_are_bound_by_issuing_them(kib: float, gb_per_s: float) -> None:
    # 2.3 us a call, overlapped with the copies before it: fragment / 2.3 us, up to the link.
    assert speed(CopyPath.PER_PAGE, D2H, kib, 1_000) == pytest.approx(gb_per_s * 1e9, rel=0.05)


@given(
    st.sampled_from(CopyPath),
    st.sampled_from(Direction),
    st.integers(1, 4 * KIB * KIB),
    st.integers(0, 10**7),
    st.floats(1e9, 400e9),
)
def test_no_copy_is_faster_than_the_link(
    path: CopyPath, direction: Direction, fragment: int, count: int, link: float
) -> None:
    assert 0 < copy_bytes_per_s(path, direction, fragment, count, link) <= link


@given(
    st.sampled_from(CopyPath),
    st.sampled_from(Direction),
    st.integers(1, 256 * KIB),
    st.integers(1, 256 * KIB),
    st.integers(1, 10**6),
)
def test_larger_fragments_are_never_slower(
    path: CopyPath, direction: Direction, one: int, other: int, count: int
) -> None:
    small, large = sorted((one, other))
    slow = copy_bytes_per_s(path, direction, small, count, LINK)
    assert copy_bytes_per_s(path, direction, large, count, LINK) >= slow * (1 - 1e-9)


# Order and sharing -------------------------------------------------------------------------


def test_one_copy_takes_its_bytes_over_its_speed() -> None:
    world = World()
    world.submit_at(1.0, H2D, 974, "a")
    assert world.run() == {"a": pytest.approx(1.0 + 974 / world.one_way)}


def test_copies_of_one_direction_go_in_turn() -> None:
    world = World()
    world.submit_at(0.0, D2H, 1000, "first")
    world.submit_at(0.0, D2H, 10, "second")
    ends = world.run()
    assert [name for name, _ in world.arrived] == ["first", "second"]
    assert ends["second"] == pytest.approx(1010 / world.one_way)


def test_both_directions_at_once_share_the_duplex_sum_and_recover() -> None:
    # Alone 97.4 bytes/s, both at once three quarters of it (150 of 2 x 100).
    world, full = World(), 97.4
    half = 0.75 * full
    world.submit_at(0.0, D2H, 974, "down")
    world.submit_at(2.0, H2D, 4 * 73, "up")
    ends = world.run()
    up_s = 2.0 + 4 * 73 / half
    down_s = up_s + (974 - 2.0 * full - (up_s - 2.0) * half) / full
    assert ends == {"up": pytest.approx(up_s), "down": pytest.approx(down_s)}


def test_three_overlapping_copies_end_at_the_times_worked_out_by_hand() -> None:
    world, full, half = World(), 97.4, 0.75 * 97.4
    world.submit_at(0.0, D2H, 487, "down1")  # 5 s alone
    world.submit_at(1.0, H2D, 292, "up")
    world.submit_at(1.5, D2H, 974, "down2")
    up_s = 1.0 + 292 / half  # down1 is busy longer than that
    down1_s = up_s + (487 - full - (up_s - 1.0) * half) / full
    assert up_s < down1_s
    assert world.run() == {
        "up": pytest.approx(up_s),
        "down1": pytest.approx(down1_s),
        "down2": pytest.approx(down1_s + 974 / full),
    }


def test_a_copy_that_is_nearly_through_does_not_end_with_the_other_direction() -> None:
    world = World()
    world.submit_at(0.0, H2D, 500, "up")
    world.submit_at(0.0, D2H, 510, "down")
    ends = world.run()
    assert ends["up"] == pytest.approx(500 / (0.75 * 97.4))
    assert ends["down"] == pytest.approx(ends["up"] + 10 / 97.4)


def test_a_link_whose_directions_do_not_disturb_each_other_shares_nothing() -> None:
    world = World(duplex=1e9)
    world.submit_at(0.0, D2H, 974, "down")
    world.submit_at(0.0, H2D, 974, "up")
    assert world.run() == {"up": pytest.approx(10.0), "down": pytest.approx(10.0)}


def test_a_copy_that_descriptors_bind_leaves_the_rest_of_the_link_to_the_other_direction() -> None:
    # 10,000 fragments of 16 KiB: 7.1 GB/s up. 50 GB/s down fit beside them into 83.4.
    world = World(50e9, 83.4e9, path=CopyPath.BATCH_DMA, fragment=16 * KIB)
    up = 10_000 * 16 * KIB
    world.submit_at(0.0, H2D, up, "up")
    world.submit_at(0.0, D2H, 10**9, "down")
    assert world.run() == {"up": pytest.approx(up / 7.1e9), "down": pytest.approx(0.02)}


def test_the_number_of_descriptors_of_a_copy_is_its_own() -> None:
    # Two calls of 10,000 descriptors of 16 KiB run at 7.1 GB/s, one of 100,000 at 6.3.
    world = World(50e9, 83.4e9, path=CopyPath.BATCH_DMA, fragment=16 * KIB)
    few, many = 10_000 * 16 * KIB, 100_000 * 16 * KIB
    world.submit_at(0.0, H2D, few, "one")
    world.submit_at(0.0, H2D, few, "two")
    world.submit_at(1.0, H2D, many, "large")
    ends = world.run()
    assert ends["two"] == pytest.approx(2 * few / 7.1e9)
    assert ends["large"] - 1.0 == pytest.approx(many / 6.3e9)


# Ranks on one link -------------------------------------------------------------------------


def test_ranks_share_a_link_evenly_and_the_last_has_it_alone() -> None:
    world, full = World(num_ranks=2), 97.4
    world.submit_at(0.0, D2H, 487, "short", rank=0)
    world.submit_at(0.0, D2H, 974, "long", rank=1)
    short_s = 487 / (full / 2)
    assert world.run() == {
        "short": pytest.approx(short_s),
        "long": pytest.approx(short_s + 487 / full),
    }


def test_a_rank_that_descriptors_bind_leaves_its_part_to_the_others() -> None:
    world = World(50e9, 83.4e9, path=CopyPath.PER_PAGE, fragment=16 * KIB, num_ranks=3)
    own = 16 * KIB / 2.3e-6  # 7.1 GB/s: three of them fit into one direction
    for rank in range(3):
        world.submit_at(0.0, D2H, 10**9, f"{rank}", rank=rank)
    assert list(world.run().values()) == pytest.approx([10**9 / own] * 3)


def test_a_direction_gets_its_half_however_many_ranks_the_other_has() -> None:
    world, half = World(num_ranks=3), 0.75 * 97.4
    for rank in range(3):
        world.submit_at(0.0, D2H, 1000, f"down{rank}", rank=rank)
    world.submit_at(0.0, H2D, 730, "up", rank=1)
    assert world.run()["up"] == pytest.approx(730 / half)


@given(st.lists(st.floats(0, 1e3), max_size=8), st.floats(0.1, 1e3))
def test_shares_are_as_even_as_the_demands_allow(demands: list[float], capacity: float) -> None:
    shares = max_min(demands, capacity)
    assert len(shares) == len(demands)
    assert sum(shares) == pytest.approx(min(sum(demands), capacity))
    most = max(shares, default=0.0)
    for share, demand in zip(shares, demands, strict=True):
        assert 0.0 <= share <= demand
        # Who gets less than another wanted no more.
        assert share == demand or share == pytest.approx(most)


def test_a_copy_may_be_submitted_from_the_end_of_another() -> None:
    world = World()
    world.heap.at(
        0.0,
        lambda _: world.link.submit(
            H2D, 974, lambda now_s: world.submit_at(now_s, D2H, 974, "back")
        ),
    )
    assert world.run() == {"back": pytest.approx(20.0)}


RANKS = 3
COPIES = st.lists(
    st.tuples(
        st.floats(0, 50), st.sampled_from(Direction), st.integers(0, 5000), st.integers(0, 2)
    ),
    min_size=1,
    max_size=12,
)


@given(COPIES)
def test_every_copy_arrives_once_in_turn_and_no_sooner_than_the_link_allows(
    copies: list[tuple[float, Direction, int, int]],
) -> None:
    world = World(num_ranks=RANKS)
    copies.sort(key=lambda c: c[0])
    for index, (at_s, direction, num_bytes, rank) in enumerate(copies):
        world.submit_at(at_s, direction, num_bytes, f"{index}", rank)
    ends = world.run()
    assert len(ends) == len(copies)
    # Less than a byte may be rounded away per copy.
    for index, (at_s, _, num_bytes, _) in enumerate(copies):
        assert ends[str(index)] >= at_s + (num_bytes - 1) / world.one_way - 1e-9
    for engine in {(c[1], c[3]) for c in copies}:
        times = [ends[str(i)] for i, c in enumerate(copies) if (c[1], c[3]) == engine]
        assert times == sorted(times)
    first, last = copies[0][0], max(ends.values())
    for direction in Direction:
        mine = [c for c in copies if c[1] is direction]
        assert sum(c[2] - 1 for c in mine) <= (last - first) * world.one_way * (1 + 1e-9) + 1e-6
    assert sum(c[2] - 1 for c in copies) <= (last - first) * 150.0 * (1 + 1e-9) + 1e-6
    serial = sum(c[2] for c in copies) / (0.75 * world.one_way)
    assert last <= copies[-1][0] + serial + 1e-6


@given(COPIES, st.integers(1, 9))
def test_cutting_a_copy_changes_no_end_but_for_its_own_parts(
    copies: list[tuple[float, Direction, int, int]], num_parts: int
) -> None:
    whole, cut = World(num_ranks=RANKS), World(num_ranks=RANKS)
    for index, (at_s, direction, num_bytes, rank) in enumerate(copies):
        whole.submit_at(at_s, direction, num_bytes * num_parts, f"{index}", rank)
        for part in range(num_parts):
            last = f"{index}" if part == num_parts - 1 else f"{index}.{part}"
            cut.submit_at(at_s, direction, num_bytes, last, rank)
    ends, parts = whole.run(), cut.run()
    # A part may end with less than a byte missing.
    slack_s = num_parts * len(copies) / (0.75 * whole.one_way / RANKS)
    for name, end_s in ends.items():
        assert parts[name] == pytest.approx(end_s, abs=slack_s)
