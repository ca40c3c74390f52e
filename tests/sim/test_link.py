"""A worker's links: one stands for all ranks."""

from __future__ import annotations

import pytest

from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap
from kvtier.sim.link import Link
from kvtier.transfer.link import CopyPath, LinkSpec

D2H, H2D = Direction.D2H, Direction.H2D


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_ranks_with_links_of_their_own_share_the_bytes(num_ranks: int) -> None:
    heap = EventHeap()
    link = Link(heap, LinkSpec(CopyPath.BATCH_DMA, 1, 100.0, 150.0), num_ranks)
    ends: list[float] = []
    link.submit(D2H, 1000, ends.append)
    while heap.step(float("inf")):
        pass
    assert ends == [pytest.approx(10.0 / num_ranks)]


def test_bytes_of_each_direction_are_counted_over_all_ranks() -> None:
    link = Link(EventHeap(), LinkSpec(CopyPath.STAGED, 1, 100.0, 150.0), num_ranks=3)
    for direction, num_bytes in ((D2H, 7), (H2D, 5), (D2H, 11)):
        link.submit(direction, num_bytes, lambda _: None)
    assert link.moved_bytes == {D2H: 18, H2D: 5}
