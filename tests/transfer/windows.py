"""A queue of chunks behind a transfer window, over a model of a link."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.ids import Direction
from kvtier.sim.heap import EventHeap
from kvtier.transfer.link import CopyPath, HostLink, LinkSpec
from kvtier.transfer.window import TransferWindow, Window, WindowSettings

CHUNK = 1000
LINK = 1e6
"""bytes/s of one direction: a chunk takes 1 ms."""


def settings(**changed: float) -> WindowSettings:
    return WindowSettings(**{"chunk_bytes": CHUNK, "probe_windows": 128, **changed})  # type: ignore[arg-type]


def link(heap: EventHeap, num_ranks: int = 1) -> HostLink:
    return HostLink(heap, LinkSpec(CopyPath.BATCH_DMA, 1, LINK, 1.5 * LINK), num_ranks)


@dataclass
class Feeder:
    """Keeps the link busy in one direction, as far as its window lets it.

    `notice_s`: the time in which the end of a copy becomes known, while the link goes on.
    """

    heap: EventHeap
    host: HostLink
    window: Window = field(default_factory=lambda: TransferWindow(settings()))
    direction: Direction = Direction.D2H
    rank: int = 0
    notice_s: float = 0.0
    in_flight: int = 0
    moved: int = 0
    most_in_flight: int = 0
    sizes: list[int] = field(default_factory=list)
    """The window after each end."""

    def feed(self, now_s: float) -> None:
        while self.window.room(self.in_flight) >= CHUNK:
            self.in_flight += CHUNK
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.window.sent(CHUNK, now_s)
            self.host.submit(self.direction, CHUNK, self._arrived(now_s), rank=self.rank)

    def _arrived(self, sent_s: float):  # type: ignore[no-untyped-def]
        def noticed(now_s: float) -> None:
            self.in_flight -= CHUNK
            self.moved += CHUNK
            self.window.ended(CHUNK, sent_s, now_s)
            if isinstance(self.window, TransferWindow):
                self.sizes.append(self.window.size_bytes)
            self.feed(now_s)

        return lambda now_s: self.heap.at(now_s + self.notice_s, noticed)


def run(heap: EventHeap, until_s: float) -> None:
    while heap.step(until_s):
        pass
