"""Copies that fail or are slow on purpose, around any backend."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from threading import Lock

from kvtier.errors import ConfigError, TransferError
from kvtier.transfer.backend import Backend, Done
from kvtier.transfer.job import Chunk


class FaultyBackend:
    """A `Backend` that lets some chunks of `inner` fail, and delays their ends.

    A chunk fails with probability `failure_rate`, or if it is one of `failing_chunks` (they count
    from 0 in the order of their starts). Half of those that fail, by the same seed, are copied
    before: a failed copy may have written everything. Every chunk that is copied ends up to
    `max_delay_s` late, in the thread of `inner` that copied it, as on a slower link. Draws follow
    the order of starts, so the same starts and seed give the same faults.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        failure_rate: float = 0.0,
        failing_chunks: Collection[int] = (),
        max_delay_s: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not 0.0 <= failure_rate <= 1.0:
            raise ConfigError(f"failure_rate={failure_rate}; pass a share from 0 to 1")
        if max_delay_s < 0.0:
            raise ConfigError(f"max_delay_s={max_delay_s}; pass 0 or more")
        self.inner = inner
        self.geometry = inner.geometry
        self.path_name = inner.path_name
        self.polled = inner.polled
        self.num_started = 0
        self.num_failed = 0
        self._failure_rate = failure_rate
        self._failing = frozenset(failing_chunks)
        self._max_delay_s = max_delay_s
        self._sleep = sleep
        self._random = random.Random(seed)
        self._lock = Lock()

    def start(self, chunk: Chunk, done: Done) -> None:
        with self._lock:
            number = self.num_started
            self.num_started += 1
            draws = [self._random.random() for _ in range(3)]
            fails = draws[0] < self._failure_rate or number in self._failing
            self.num_failed += fails
        error = TransferError(f"injected fault in chunk {number}") if fails else None
        if error is not None and draws[1] < 0.5:
            raise error
        delay_s = draws[2] * self._max_delay_s

        def ended(inner_error: Exception | None) -> None:
            if delay_s:
                self._sleep(delay_s)
            done(inner_error or error)

        self.inner.start(chunk, ended)

    def poll(self) -> None:
        self.inner.poll()

    def close(self) -> None:
        self.inner.close()
