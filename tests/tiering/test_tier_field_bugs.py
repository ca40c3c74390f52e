"""What broke in other tiering caches: a situation each, numbered as in the list of field bugs."""

from __future__ import annotations

import pytest

from kvtier.errors import TieringError
from kvtier.ids import Label
from kvtier.tiering.kept import Kept
from kvtier.tiering.lease import LeaseState
from kvtier.tiering.moves import Why
from kvtier.tiering.room import TierMode
from kvtier.tree.node import Tier

from .rig import Rig, fill, prompt


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
        assert_all_given_back(rig)


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
    assert_all_given_back(rig)
    rig.serve("p", prompt(1, 6))


def test_b02_a_request_aborted_while_it_grows_gives_all_back() -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("p", prompt(1, 4))
    lease = rig.open("q", prompt(2, 4))
    assert lease is not None
    assert rig.manager.extend(lease, 2, pytest.fail) is False
    rig.manager.close(lease, well=False)
    assert_all_given_back(rig)


@pytest.mark.parametrize("well", [True, False])
def test_b02_a_program_that_leaves_while_its_kv_goes_down_gives_all_back(well: bool) -> None:
    rig = Rig(hbm=8, dram=16, mode=TierMode(write_through=True))
    lease = rig.open("p", prompt(1, 4))
    assert lease is not None
    rig.compute(lease, prompt(1, 4))
    rig.manager.close(lease, well=True)
    assert [move.why for move in rig.mover.moves] == [Why.WRITE_THROUGH]
    again = rig.open("p", prompt(1, 6))
    assert again is not None
    rig.manager.close(again, well=False)
    rig.manager.release("p")
    rig.end_next(well=well)
    assert rig.held(Tier.DRAM) == 4 * well
    fill(rig)
    assert_all_given_back(rig)


def assert_all_given_back(rig: Rig) -> None:
    rig.end_all()
    assert rig.manager.room.promised == 0
    assert rig.manager.tree.pages[Tier.HBM].pinned == 0
    for tier in Tier:
        assert rig.held(tier) == rig.manager.tree.pages[tier].total


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
