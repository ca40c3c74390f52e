"""A manager whose copies end when a test says so."""

from __future__ import annotations

from typing import Any

from kvtier.ids import Label
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tiering.room import TierMode
from kvtier.tree.node import Tier

from .memory import SlowMover


class Rig:
    """Every page is a token of its own."""

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
