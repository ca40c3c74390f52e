"""A backend that lets chunks through one by one, so that tests meet jobs in every state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.transfer.backend import Backend, Done
from kvtier.transfer.job import Chunk

_LONG_S = 30.0
"""No copy of a test takes this long; it only bounds a test that hangs."""


class Gate:
    """Holds each chunk until `let` passes it to `inner`, which copies it for real.

    `started(chunk)` is told of every chunk when the engine starts it, `ended(chunk, error)` when
    it has ended, just before the engine hears of it. While `open` is set, chunks pass at once.
    """

    def __init__(
        self,
        inner: Backend,
        started: Callable[[Chunk], None] = lambda chunk: None,
        ended: Callable[[Chunk, Exception | None], None] = lambda chunk, error: None,
    ) -> None:
        self.inner = inner
        self.started, self.ended = started, ended
        self.open = False
        self.waiting: list[tuple[Chunk, Done]] = []
        self.wrong: list[BaseException] = []
        """What observers and the engine's callback raised, wherever that was."""
        self._lock = threading.Lock()

        self.geometry, self.path_name, self.polled = inner.geometry, inner.path_name, inner.polled

    def poll(self) -> None:
        self.inner.poll()

    def close(self) -> None:
        self.inner.close()

    def start(self, chunk: Chunk, done: Done) -> None:
        self._tell(self.started, chunk)
        with self._lock:
            held = not self.open
            if held:
                self.waiting.append((chunk, done))
        if not held:
            self._pass(chunk, done)

    def let(self, *indices: int) -> None:
        """These of the waiting chunks pass, each when the engine knows of the one before.

        Not at once: the engine would go on in one thread while another notes an end of which the
        engine has not heard.
        """
        chosen = [self.waiting[index] for index in indices]
        with self._lock:
            self.waiting = [item for item in self.waiting if item not in chosen]
        for chunk, done in chosen:
            assert self._pass(chunk, done).wait(_LONG_S), "a copy did not end"
        if self.wrong:
            raise self.wrong[0]

    def open_wide(self) -> None:
        """Whatever waits passes, and whatever comes, until `open` is cleared."""
        with self._lock:
            self.open = True
            waiting, self.waiting = self.waiting, []
        for chunk, done in waiting:
            self._pass(chunk, done)

    def _tell(self, listener: Callable[..., None], *news: object) -> None:
        """What is wrong is raised by `let`: chunks go on, so that the engine can be closed."""
        try:
            listener(*news)
        except BaseException as error:
            self.wrong.append(error)

    def _pass(self, chunk: Chunk, done: Done) -> threading.Event:
        over = threading.Event()

        def ended(error: Exception | None) -> None:
            self._tell(self.ended, chunk, error)
            self._tell(done, error)
            over.set()

        try:
            self.inner.start(chunk, ended)
        except Exception as error:
            ended(error)
        return over
