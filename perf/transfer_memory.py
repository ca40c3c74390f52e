"""Transfers of real bytes: a second process copies them, one chunk after the other."""

from __future__ import annotations

from collections import deque
from random import Random
from time import monotonic

from kvtier.errors import SimulationError
from kvtier.ids import Direction
from kvtier.transfer.job import Chunk
from perf.memory_copier import MemoryCopier
from perf.transfer_load import Clients, Load, Outcome

_PAGE_BYTES = 1 << 20
_CHUNK_PAGES = 32
_JOB_PAGES = 32
_URGENT_PER_S = 200.0
_WARM_S = 1.5
_SLOW_BYTES_PER_S = 4e9
HALF_BYTES = 256 << 20


def check(copier: MemoryCopier) -> None:
    """Copy all of it, in chunks. Raises SimulationError where the bytes are not the same.

    Also the first touch of the child, whose page faults belong to no figure.
    """
    num_bytes = _CHUNK_PAGES * _PAGE_BYTES
    for place in range(0, HALF_BYTES, num_bytes):
        copier.submit(place, place, num_bytes)
        while not copier.ended(1.0):
            pass
    if not copier.same(0, 0, HALF_BYTES):
        raise SimulationError("the copied bytes differ from their source; nothing was timed")


def run(copier: MemoryCopier, num_jobs: int, window: str, duration_s: float, seed: int) -> Outcome:
    """`num_jobs` for `duration_s`, after the first of them have ended."""
    load = Load(_PAGE_BYTES, _CHUNK_PAGES, _JOB_PAGES, {Direction.H2D: num_jobs}, window)
    from_s = monotonic() + _WARM_S + num_jobs * _JOB_PAGES * _PAGE_BYTES / _SLOW_BYTES_PER_S
    clients = Clients(load, load.core(), from_s, from_s + duration_s)
    _Driver(copier, clients, Random(seed)).run()
    return Outcome.of([clients])


class _Driver:
    """One core whose chunks the other process copies.

    Each chunk goes to the next part of the memory, so that none finds its bytes in a cache.
    """

    def __init__(self, copier: MemoryCopier, clients: Clients, random: Random) -> None:
        self._copier = copier
        self._clients = clients
        self._random = random
        self._flying: deque[Chunk] = deque()
        self._place = 0

    def run(self) -> None:
        clients = self._clients
        clients.start(monotonic())
        ask_s = self._next(monotonic())
        while clients.core.num_live or monotonic() < clients.measure_until_s:
            self._issue()
            for _ in range(self._copier.ended(min(ask_s - monotonic(), 1.0))):
                clients.ended(self._flying.popleft(), monotonic())
            if ask_s <= monotonic() < clients.measure_until_s:
                clients.ask(monotonic())
                ask_s = self._next(ask_s)

    def _next(self, now_s: float) -> float:
        return now_s + self._random.expovariate(_URGENT_PER_S)

    def _issue(self) -> None:
        for chunk in self._clients.core.issue(monotonic()):
            if self._place + chunk.num_bytes > HALF_BYTES:
                self._place = 0
            self._copier.submit(self._place, self._place, chunk.num_bytes)
            self._place += chunk.num_bytes
            self._flying.append(chunk)
