"""Many programs in two equal tiers with large pages; what may be done once is refused twice."""

from __future__ import annotations

from random import Random

import pytest

from kvtier.errors import TieringError
from kvtier.ids import Label
from kvtier.tiering.lease import LeaseState
from kvtier.tiering.room import TierMode
from kvtier.tree.node import Tier

from .rig import Rig, prompt
from .worker import Worker


def live(steps: int) -> Worker:
    """B10: equal tiers, pages of 64, 64 programs with shared and own prefixes."""
    worker = Worker((24, 24), TierMode(), page_size=64, failing=0.01, reserve=4, num_programs=64)
    choose = Random(10)
    worker.walk(choose, steps)
    worker.drain(choose)
    return worker


def test_b10_many_programs_in_equal_tiers() -> None:
    worker = live(10_000)
    assert worker.done["room ends well"] > 20
    assert worker.done["load ends well"] > 20


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_b10_a_hundred_thousand_operations() -> None:
    assert live(100_000).manager.counters.loaded > 2_000


def test_a_lease_is_closed_once_and_refuses_what_comes_after() -> None:
    rig = Rig(hbm=16, dram=16)
    lease = rig.serve("p", prompt(1, 3))
    with pytest.raises(TieringError, match="ended already"):
        rig.manager.close(lease, well=True)
    with pytest.raises(TieringError, match="not ready"):
        rig.manager.publish(lease, prompt(1, 3))
    with pytest.raises(TieringError, match="needs its program"):
        rig.manager.open(prompt(1, 3), num_pages=3, request="r")
    assert lease.state is LeaseState.ENDED
    assert rig.held(Tier.HBM) == 3


def test_a_move_ends_once() -> None:
    rig = Rig(hbm=16, dram=16)
    rig.serve("p", prompt(1, 3))
    rig.manager.relabel("p", Label.IDLE)
    assert rig.manager.demote("p")
    move = rig.end_next()
    with pytest.raises(TieringError, match="ended already"):
        rig.manager.ended(move, well=False)
    assert rig.manager.kept("p").pages == 3
