"""Transfers over the modelled link: cores, windows and clients are real, time and bytes are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvtier.hardware import load_gpu
from kvtier.ids import Direction
from kvtier.layout import load_model
from kvtier.sim.heap import EventHeap
from kvtier.transfer.job import Chunk
from kvtier.transfer.link import CopyPath, HostLink, LinkSpec
from perf.transfer_load import Clients, Load, Outcome

_PAGE_TOKENS = 16
_CHUNK_BYTES = 16 << 20
_JOB_PAGES = 128
_URGENT_PER_S = 100.0
"""Of all ranks: each has its share of these as of the link, so that urgent pages queue behind each
other as rarely with many ranks as with one."""
_WARM_S = 3.0
MODEL, GPU = "Qwen2.5-7B", "H100"


@dataclass(frozen=True)
class Scene:
    """Who shares the link.

    With 0 jobs, rank 0 has none to HBM, and the other direction and the other ranks have one each:
    what an urgent page meets that no queue of its own holds up.
    """

    name: str
    directions: tuple[Direction, ...] = (Direction.H2D,)
    num_ranks: int = 1

    def num_jobs(self, count: int, rank: int) -> dict[Direction, int]:
        """Jobs of a rank by direction."""
        jobs = dict.fromkeys(self.directions, max(count, 1))
        if count == 0 and rank == 0:
            jobs[Direction.H2D] = 0
        return jobs


SCENES = (
    Scene("one way"),
    Scene("both ways", (Direction.H2D, Direction.D2H)),
    Scene("4 ranks, one way", num_ranks=4),
)


def run(scene: Scene, num_jobs: int, window: str, duration_s: float, seed: int) -> Outcome:
    """`num_jobs` per rank and direction for `duration_s` simulated seconds after the warm-up."""
    layout, gpu = load_model(MODEL).layout(1, _PAGE_TOKENS), load_gpu(GPU)
    page_bytes = layout.bytes_per_token_all_ranks * _PAGE_TOKENS
    heap = EventHeap()
    one_way, duplex = gpu.link_bytes_per_s, gpu.link_duplex_bytes_per_s
    spec = LinkSpec(CopyPath.STAGED, layout.fragment_bytes(), one_way, duplex)
    link = HostLink(heap, spec, scene.num_ranks)
    ranks = []
    for rank in range(scene.num_ranks):
        jobs = scene.num_jobs(num_jobs, rank)
        load = Load(page_bytes, _CHUNK_BYTES // page_bytes, _JOB_PAGES, jobs, window)
        clients = Clients(load, load.core(), _WARM_S, _WARM_S + duration_s)
        random, urgent_per_s = Random(f"{seed}/{rank}"), _URGENT_PER_S / scene.num_ranks
        ranks.append(_Rank(heap, link, rank, clients, random, urgent_per_s))
    for each in ranks:
        each.start()
    while heap.step(float("inf")):
        pass
    clients_of = [each.clients for each in ranks]
    assert all(clients.core.num_live == 0 for clients in clients_of)
    return Outcome.of(clients_of, asking=clients_of if num_jobs else clients_of[:1])


class _Rank:
    """One core whose chunks go over the link."""

    def __init__(
        self,
        heap: EventHeap,
        link: HostLink,
        rank: int,
        clients: Clients,
        random: Random,
        urgent_per_s: float,
    ) -> None:
        self.clients = clients
        self._heap = heap
        self._link = link
        self._rank = rank
        self._random = random
        self._urgent_per_s = urgent_per_s

    def start(self) -> None:
        self._heap.at(0.0, self._begin)
        self._later(0.0)

    def _begin(self, now_s: float) -> None:
        self.clients.start(now_s)
        self._issue(now_s)

    def _later(self, now_s: float) -> None:
        at_s = now_s + self._random.expovariate(self._urgent_per_s)
        if at_s < self.clients.measure_until_s:
            self._heap.at(at_s, self._ask)

    def _ask(self, now_s: float) -> None:
        self.clients.ask(now_s)
        self._issue(now_s)
        self._later(now_s)

    def _issue(self, now_s: float) -> None:
        for chunk in self.clients.core.issue(now_s):
            self._link.submit(
                chunk.direction, chunk.num_bytes, self._arrival(chunk), rank=self._rank
            )

    def _arrival(self, chunk: Chunk) -> Callable[[float], None]:
        def arrived(now_s: float) -> None:
            self.clients.ended(chunk, now_s)
            self._issue(now_s)

        return arrived
