"""Loads that several wait for, that fail, or come ahead of need; room that is waited for."""

from __future__ import annotations

import pytest

from kvtier.ids import Direction, Label
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.kept import Kept
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.moves import Why
from kvtier.tree.node import Tier

from .rig import Rig, fill, prompt


def finish_two(rig: Rig, program: str, first: list[int], second: list[int]) -> None:
    """Two requests of one program at a time: it holds both prompts."""
    leases = [rig.open(program, tokens) for tokens in (first, second)]
    for lease, tokens in zip(leases, (first, second), strict=True):
        assert lease is not None
        rig.end_all()
        rig.compute(lease, tokens)
    for lease in leases:
        assert lease is not None
        rig.manager.close(lease, well=True)


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


def test_a_shared_load_goes_on_for_the_others_when_the_first_is_aborted() -> None:
    rig = Rig(hbm=16, dram=16)
    rig.serve("p0", prompt(1, 4))
    rig.demote("p0")
    fill(rig)
    first, second = rig.open("p0", prompt(1, 4)), rig.open("p1", prompt(1, 4))
    assert first is not None
    assert second is not None
    rig.manager.close(first, well=False)
    rig.end_next()
    assert (second.state, second.cached) == (LeaseState.READY, 4)
    rig.assert_readable(second, prompt(1, 4))
    assert rig.manager.counters.loaded == 4


def test_without_room_for_all_who_lost_a_shared_load_the_last_are_told_that_they_failed() -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("p0", prompt(0, 4))
    rig.demote("p0")
    fill(rig)
    told: list[Lease] = []
    prompts = [prompt(0, 4) + prompt(program, 1) for program in (1, 2)]
    leases = [rig.open(f"p{at}", tokens, on_ready=told.append) for at, tokens in enumerate(prompts)]
    rig.end_next(well=False)
    assert told == leases
    assert [lease.state for lease in told] == [LeaseState.READY, LeaseState.FAILED]
    rig.compute(told[0], prompts[0])
    rig.manager.close(told[1], well=False)
    rig.manager.close(told[0], well=True)
    rig.serve("p1", prompts[1])
    assert rig.held(Tier.HBM) == rig.manager.tree.pages[Tier.HBM].total


def test_a_refused_prefetch_gives_back_the_room_that_it_had() -> None:
    rig = Rig(hbm=10, dram=16)
    finish_two(rig, "p", prompt(1, 4), prompt(2, 4))
    rig.demote("p")
    fill(rig)
    running = rig.open("q", prompt(3, 4))
    assert running is not None
    assert not rig.manager.promote("p", pytest.fail)  # 4 pages fit, 8 do not
    assert not rig.mover.moves
    assert rig.held(Tier.HBM) == rig.manager.tree.pages[Tier.HBM].total + running.own.size
    rig.manager.close(running, well=False)
    assert rig.manager.kept("p") == Kept(0, 4)


def test_a_prefetch_survives_that_room_for_one_prompt_takes_the_next_away() -> None:
    rig = Rig(hbm=8, dram=4)
    finish_two(rig, "p", prompt(1, 4), prompt(2, 4))
    rig.serve("filler", prompt(8, 4))  # one of the two goes down, and fills DRAM
    rig.manager.release("filler")
    lease = rig.open("q", prompt(3, 4))
    assert lease is not None
    assert sorted(rig.manager.kept("p")) == [0, 4]
    ends: list[bool] = []
    assert rig.manager.promote("p", ends.append)
    rig.end_all()
    assert ends == [True]
    assert rig.manager.kept("p") == Kept(4, 4)
    rig.manager.close(lease, well=False)


def test_a_prefetch_that_fails_takes_no_room_from_others() -> None:
    rig = Rig(hbm=8, dram=16)
    rig.serve("p", prompt(1, 4))
    rig.demote("p")
    fill(rig)
    rig.serve("busy", prompt(2, 4))
    ends: list[bool] = []
    assert rig.manager.promote("p", ends.append)
    lease = rig.open("q", prompt(3, 4))
    assert lease is not None
    assert lease.state is LeaseState.WAITING
    load = next(move for move in rig.mover.moves if move.why is Why.PREFETCH)
    rig.mover.moves.remove(load)
    rig.manager.ended(load, well=False)
    assert ends == [False]
    assert lease.state is LeaseState.READY
    rig.end_all()
    assert rig.manager.kept("busy") == Kept(4, 4)


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


def test_a_load_that_fails_while_another_waits_for_room_is_made_again_or_computed() -> None:
    rig = Rig(hbm=10, dram=16)
    rig.serve("p0", prompt(0, 4))
    rig.demote("p0")
    fill(rig)
    rig.serve("busy", prompt(5, 6))  # has to be copied down first
    first = rig.open("p0", prompt(0, 4))
    second = rig.open("p1", prompt(0, 4) + prompt(1, 2))
    assert first is not None
    assert second is not None
    assert (first.state, second.state) == (LeaseState.LOADING, LeaseState.WAITING)
    load = next(move for move in rig.mover.moves if move.why is Why.LOAD)
    rig.mover.moves.remove(load)
    rig.manager.ended(load, well=False)
    check_integrity(rig.manager)
    rig.end_all()
    for lease, tokens in ((first, prompt(0, 4)), (second, prompt(0, 4) + prompt(1, 2))):
        assert lease.state is LeaseState.READY
        rig.compute(lease, tokens)
        rig.assert_readable(lease, tokens)
        rig.manager.close(lease, well=True)
    assert rig.held(Tier.HBM) == rig.manager.tree.pages[Tier.HBM].total


@pytest.mark.parametrize("others", [0, 4])
def test_what_a_demotion_needs_room_for_goes_down_or_it_is_refused(others: int) -> None:
    """The program's own duplicates are among what makes room for the rest of it."""
    rig = Rig(hbm=16, dram=4 + others)
    if others:
        rig.serve("other", prompt(2, others))
        rig.demote("other")
        rig.manager.relabel("other", Label.BUSY)
        rig.serve("filler", prompt(9, 12 + 4))
        rig.manager.release("filler")  # `other` is in DRAM alone
    rig.serve("p", prompt(1, 4))
    rig.demote("p")
    rig.serve("p", prompt(1, 6))
    rig.manager.relabel("p", Label.IDLE)
    answer = rig.manager.demote("p")
    rig.end_all()
    assert bool(answer) is bool(others)
    fill(rig)
    assert rig.manager.kept("p").pages == (6 if others else 4)


def test_where_the_first_of_two_loads_fails_last_what_is_behind_the_gap_is_not_read() -> None:
    rig = Rig(hbm=16, dram=16)
    rig.serve("p", prompt(1, 8))
    rig.demote("p")
    fill(rig)
    head = rig.open("q", prompt(1, 4))
    both = rig.open("p", prompt(1, 8))
    assert head is not None
    assert both is not None
    assert len(rig.mover.moves) == 2  # the second loads the rest, and waits for the first
    rig.mover.moves.reverse()
    rig.end_next()
    rig.end_next(well=False)
    for lease, tokens in ((both, prompt(1, 8)), (head, prompt(1, 4))):
        assert (lease.state, lease.cached) == (LeaseState.READY, 0)
        rig.compute(lease, tokens)
        rig.assert_readable(lease, tokens)
        rig.manager.close(lease, well=True)
    check_integrity(rig.manager)
    assert rig.held(Tier.HBM) == rig.manager.tree.pages[Tier.HBM].total
