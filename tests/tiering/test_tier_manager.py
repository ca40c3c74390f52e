"""Random lives of a worker's tiers: no page lost, none read that is not its own, none waits on."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.errors import TieringError
from kvtier.tiering.room import TierMode

from .worker import Worker

MODES = {
    "labels": TierMode(),
    "no labels": TierMode(labels=False),
    "write through": TierMode(write_through=True, labels=False),
    "no offload": TierMode(offload=False, labels=False),
}


def live(seed: int, steps: int, mode: TierMode, failing: float) -> Worker:
    hbm, dram = ((12, 24), (16, 16), (20, 6), (10, 0))[seed % 4]
    worker = Worker(seed, hbm, dram, mode, (1, 4)[seed // 4 % 2], failing)
    for _ in range(steps):
        worker.step()
    worker.drain()
    return worker


@pytest.mark.parametrize("failing", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_random_lives_keep_every_law(mode: str, failing: float) -> None:
    for seed in range(8):
        live(seed, 400, MODES[mode], failing)


def test_random_lives_meet_what_they_are_meant_to_meet() -> None:
    done: Counter[str] = Counter()
    for seed in range(32):
        done.update(live(seed, 400, TierMode(), 0.1).done)
    expected = {
        *("open ready", "open waiting", "open loading", "publish", "extend True"),
        *("close ready", "close waiting", "close loading"),
        *("end d2h room True", "end d2h room False", "end d2h demote True"),
        *("end h2d load True", "end h2d load False", "end h2d prefetch True"),
        *("relabel", "demote", "promote", "release"),
    }
    assert not expected - {name for name, times in done.items() if times >= 3}


def test_a_lease_is_closed_once_and_a_move_ends_once() -> None:
    worker = Worker(0, 16, 16, TierMode(), 1, 0.0)
    lease = worker.manager.open([1, 2, 3], num_pages=3, request="r", program="p")
    assert lease is not None
    worker.manager.publish(lease, [1, 2, 3])
    worker.manager.close(lease, well=True)
    with pytest.raises(TieringError, match="ended already"):
        worker.manager.close(lease, well=True)
    with pytest.raises(TieringError, match="not ready"):
        worker.manager.publish(lease, [1, 2, 3])
