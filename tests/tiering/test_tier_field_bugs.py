"""What broke in other tiering caches: a situation each, numbered as in the list of field bugs."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import TieringError
from kvtier.ids import Direction, Label
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.kept import Kept
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move, Why
from kvtier.tiering.room import TierMode
from kvtier.tree.node import Tier

from .worker import SlowMover


class Rig:
    """A manager whose copies end when a test says so; every page is a token of its own."""

    def __init__(self, hbm: int, dram: int, mode: TierMode | None = None) -> None:
        self.mover = SlowMover()
        self.manager = TierManager(hbm, dram, self.mover, page_size=1, mode=mode)
        self._num_requests = 0

    def open(self, program: str, tokens: list[int], **more: Any) -> Lease | None:
        self._num_requests += 1
        request = f"{program}/{self._num_requests}"
        num_pages = more.pop("num_pages", len(tokens))
        return self.manager.open(
            tokens, num_pages=num_pages, request=request, program=program, **more
        )

    def serve(self, program: str, tokens: list[int]) -> Lease:
        """A whole request; copies that it waits for end at once."""
        lease = self.open(program, tokens)
        assert lease is not None
        while lease.state is not LeaseState.READY:
            self.end_next()
        self.compute(lease, tokens)
        self.manager.close(lease, well=True)
        check_integrity(self.manager)
        return lease

    def compute(self, lease: Lease, tokens: list[int]) -> None:
        for at, page in enumerate(lease.pages.tolist()):
            if at >= lease.cached:
                self.mover.contents[Tier.HBM][page] = tuple(tokens[: at + 1])
        self.manager.publish(lease, tokens)

    def end_next(self, *, well: bool = True) -> Move:
        move = self.mover.moves.pop(0)
        if well:
            self.mover.copy(move)
        self.manager.ended(move, well=well)
        check_integrity(self.manager)
        return move

    def end_all(self) -> None:
        while self.mover.moves:
            self.end_next()

    def demote(self, program: str) -> None:
        self.manager.relabel(program, Label.IDLE)
        assert self.manager.demote(program) is not False
        self.end_all()

    def held(self, tier: Tier) -> int:
        """Pages of the pool that are not free; all of them are the tree's once nobody runs."""
        pool = self.manager.pools[tier]
        return pool.num_pages - pool.num_free

    def assert_readable(self, lease: Lease, tokens: list[int]) -> None:
        for at, page in enumerate(lease.pages.tolist()[: lease.cached]):
            assert self.mover.contents[Tier.HBM][page] == tuple(tokens[: at + 1])


def prompt(program: int, num_pages: int) -> list[int]:
    return [1000 * program + at for at in range(1, num_pages + 1)]


def fill(rig: Rig) -> None:
    """HBM has nothing but what nobody wants any more."""
    rig.serve("filler", prompt(99, rig.manager.pools[Tier.HBM].num_pages))
    rig.manager.release("filler")


def test_b01_aborted_loads_leave_nothing_taken() -> None:
    rig = Rig(hbm=40, dram=40)
    for _ in range(2):
        for program in range(10):
            rig.serve(f"p{program}", prompt(program, 4))
            rig.demote(f"p{program}")
        fill(rig)
        leases = [rig.open(f"p{program}", prompt(program, 4)) for program in range(10)]
        for lease in leases:
            assert lease is not None
            assert lease.state is LeaseState.LOADING
            rig.manager.close(lease, well=False)
        rig.end_all()
        for tier in Tier:
            assert rig.held(tier) == rig.manager.tree.pages[tier].total
        assert rig.manager.tree.pages[Tier.HBM].pinned == 0


@pytest.mark.parametrize("state", [LeaseState.WAITING, LeaseState.LOADING, LeaseState.READY])
def test_b02_a_request_aborted_in_any_state_gives_all_back(state: LeaseState) -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("p", prompt(1, 4))
    rig.demote("p")
    if state is not LeaseState.READY:
        fill(rig)
    if state is LeaseState.WAITING:
        rig.serve("busy", prompt(2, 8))  # has to be copied down first
    lease = rig.open("p", prompt(1, 6))
    assert lease is not None
    assert lease.state is state
    rig.manager.close(lease, well=False)
    rig.end_all()
    assert rig.manager.room.promised == 0
    assert rig.held(Tier.HBM) == rig.manager.tree.pages[Tier.HBM].total
    assert rig.manager.kept("p").pages == 4
    rig.serve("p", prompt(1, 6))


def test_b04_duplicates_make_room_for_a_demotion() -> None:
    rig = Rig(hbm=16, dram=8)
    for program in (1, 2):
        rig.serve(f"p{program}", prompt(program, 4))
        rig.demote(f"p{program}")
    assert rig.manager.pools[Tier.DRAM].num_free == 0  # full of duplicates
    rig.serve("p3", prompt(3, 4))
    rig.demote("p3")
    assert rig.manager.counters.dropped == 0
    assert [rig.manager.kept(f"p{p}") for p in (1, 2, 3)] == [Kept(4, 4)] * 3


def test_b05_with_both_tiers_full_and_dram_pinned_pages_are_dropped() -> None:
    rig = Rig(hbm=8, dram=4)
    rig.serve("p", prompt(1, 4))
    rig.demote("p")
    fill(rig)
    rig.serve("q", prompt(2, 4))
    loading = rig.open("p", prompt(1, 4))  # reads all of DRAM until the load ends
    assert loading is not None
    assert loading.state is LeaseState.LOADING
    lease = rig.open("r", prompt(3, 4))
    assert lease is not None
    assert lease.state is LeaseState.READY
    assert rig.manager.counters.dropped >= 4
    assert rig.manager.kept("q") == Kept(0, 0)
    rig.end_all()
    assert loading.state is LeaseState.READY
    rig.assert_readable(loading, prompt(1, 4))


@pytest.mark.parametrize("why", [Why.ROOM, Why.DEMOTE])
def test_b06_what_failed_to_be_copied_down_does_not_count_as_kept_there(why: Why) -> None:
    rig = Rig(hbm=8, dram=8)
    rig.serve("p", prompt(1, 4))
    if why is Why.DEMOTE:
        rig.manager.relabel("p", Label.IDLE)
        assert rig.manager.demote("p")
        assert rig.manager.kept("p") == Kept(4, 4)
        waiting = None
    else:
        waiting = rig.open("q", prompt(2, 8))
        assert waiting is not None
        assert waiting.state is LeaseState.WAITING
    assert rig.end_next(well=False).why is why
    assert rig.manager.counters.write_failed == 4
    assert rig.manager.tree.pages[Tier.DRAM].total == 0
    if waiting is None:
        assert rig.manager.kept("p") == Kept(4, 4)  # where it was
    else:
        assert waiting.state is LeaseState.READY  # by dropping what it was
        assert rig.manager.kept("p") == Kept(0, 0)


def test_b08_a_promotion_keeps_its_own_sources_whatever_goes_down_for_it() -> None:
    rig = Rig(hbm=8, dram=8)
    rig.serve("p", prompt(1, 6))  # the coldest of all
    rig.demote("p")
    fill(rig)
    for program in (2, 3):
        rig.serve(f"p{program}", prompt(program, 4))  # dirty: must go down, and DRAM has room for 2
    lease = rig.open("p", prompt(1, 6))
    assert lease is not None
    rig.end_all()
    assert (lease.state, lease.cached) == (LeaseState.READY, 6)
    rig.assert_readable(lease, prompt(1, 6))


def test_b24_a_program_resumed_while_it_is_copied_down_goes_on_at_once() -> None:
    rig = Rig(hbm=12, dram=12)
    rig.serve("p", prompt(1, 4))
    rig.manager.relabel("p", Label.IDLE)
    assert rig.manager.demote("p")
    rig.manager.relabel("p", Label.BUSY)
    lease = rig.open("p", prompt(1, 6))
    assert lease is not None
    assert (lease.state, lease.cached) == (LeaseState.READY, 4)
    rig.compute(lease, prompt(1, 6))
    rig.end_all()
    rig.manager.close(lease, well=True)
    assert rig.manager.kept("p") == Kept(6, 6)
    rig.demote("p")
    fill(rig)
    again = rig.serve("p", prompt(1, 6))
    assert again.dram_pages == 6
    assert rig.manager.counters.dropped == 6  # of the filler, which nobody wanted any more


def test_b25_a_program_larger_than_dram_is_not_demoted_and_leaves_in_part() -> None:
    rig = Rig(hbm=16, dram=10)
    rig.serve("p", prompt(1, 11))
    rig.manager.relabel("p", Label.IDLE)
    assert rig.manager.demote("p") is False
    assert not rig.mover.moves
    fill(rig)
    assert rig.manager.kept("p").pages in range(1, 11)
    lease = rig.serve("p", prompt(1, 11))
    assert lease.cached == 11


def test_b36_two_programs_take_turns_in_an_hbm_for_one() -> None:
    rig = Rig(hbm=8, dram=32)
    for turn in range(6):
        program = turn % 2
        lease = rig.open(f"p{program}", prompt(program, 6))
        assert lease is not None
        assert rig.open("other", prompt(7, 6)) is None  # it cannot be had: nothing changes
        rig.end_all()
        rig.compute(lease, prompt(program, 6))
        rig.assert_readable(lease, prompt(program, 6))
        rig.manager.close(lease, well=True)
    assert rig.manager.counters.dropped == 0
    assert rig.manager.counters.loaded > 0


def test_b33_what_has_ended_cannot_end_again() -> None:
    rig = Rig(hbm=8, dram=8)
    rig.serve("p", prompt(1, 4))
    first, second = rig.open("p", prompt(1, 4)), rig.open("q", prompt(1, 4))
    assert first is not None
    assert second is not None
    rig.manager.close(first, well=True)
    with pytest.raises(TieringError, match="has ended already"):
        rig.manager.close(first, well=True)
    assert rig.manager.tree.pages[Tier.HBM].pinned == 4  # the second holder's
    rig.assert_readable(second, prompt(1, 4))
    rig.manager.relabel("p", Label.IDLE)
    move = rig.manager.demote("q")
    assert move is False  # it runs
    rig.manager.close(second, well=True)
    rig.demote("q")


def test_b39_no_clock_ends_a_lease() -> None:
    rig = Rig(hbm=12, dram=12)
    lease = rig.open("p", prompt(1, 4))
    assert lease is not None
    rig.compute(lease, prompt(1, 4))
    for other in range(2, 100):
        rig.serve("q", prompt(other, 8))
    rig.assert_readable(lease, prompt(1, 4))
    rig.manager.close(lease, well=True)


def test_b41_a_request_counts_its_hits_once_however_often_it_was_refused() -> None:
    rig = Rig(hbm=8, dram=8)
    rig.serve("p", prompt(1, 4))
    running = rig.open("q", prompt(2, 6))
    assert running is not None
    counters = rig.manager.counters
    for _ in range(5):
        assert rig.open("p", prompt(1, 4)) is None
    rig.end_all()
    before = counters.hbm_hit + counters.dram_hit
    rig.manager.close(running, well=False)
    lease = rig.open("p", prompt(1, 4))
    assert lease is not None
    assert counters.hbm_hit + counters.dram_hit - before == lease.hbm_pages + lease.dram_pages


@pytest.mark.parametrize("well", [True, False])
def test_requests_that_want_the_same_pages_share_one_load(well: bool) -> None:
    rig = Rig(hbm=16, dram=16)
    head = prompt(0, 4)
    rig.serve("p0", head)
    rig.demote("p0")
    fill(rig)
    ready: list[Lease] = []
    prompts = [head + prompt(program, 1) for program in (1, 2, 3)]
    leases = [
        rig.open(f"p{at}", tokens, on_ready=ready.append) for at, tokens in enumerate(prompts)
    ]
    assert [move.direction for move in rig.mover.moves] == [Direction.H2D]
    assert not ready
    rig.end_next(well=well)
    assert ready == leases
    assert rig.manager.counters.loaded == 4 * well
    assert rig.manager.counters.load_failed == 4 * (not well)
    for lease, tokens in zip(ready, prompts, strict=True):
        assert lease.state is LeaseState.READY
        assert (lease.cached, lease.own.size) == ((4, 1) if well else (0, 5))
        rig.compute(lease, tokens)
        rig.assert_readable(lease, tokens)
        rig.manager.close(lease, well=True)


def test_a_demotion_under_way_is_waited_for_before_busy_pages_go_down() -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("idle", prompt(1, 4))
    rig.serve("busy", prompt(2, 4))
    rig.manager.relabel("idle", Label.IDLE)
    assert rig.manager.demote("idle")
    lease = rig.open("new", prompt(3, 4))
    assert lease is not None
    assert lease.state is LeaseState.WAITING
    assert [move.why for move in rig.mover.moves] == [Why.DEMOTE]
    assert rig.mover.hurried == rig.mover.moves
    rig.end_next()
    assert lease.state is LeaseState.READY
    assert rig.manager.kept("busy") == Kept(4, 4)
    assert rig.manager.kept("idle") == Kept(0, 4)


def test_where_the_demotion_fails_others_make_the_room() -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("idle", prompt(1, 4))
    rig.serve("busy", prompt(2, 4))
    rig.manager.relabel("idle", Label.IDLE)
    assert rig.manager.demote("idle")
    lease = rig.open("new", prompt(3, 4))
    assert lease is not None
    rig.end_next(well=False)
    rig.end_all()
    assert lease.state is LeaseState.READY
    assert rig.manager.counters.dropped == 0
