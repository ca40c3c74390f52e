"""One lock, and what has to happen when it is let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Serial:
    """Runs things one at a time, from whatever thread they come.

    `post` never waits: what is posted while somebody is inside is run by him before he leaves, so a
    callback may post from anywhere. What `later` is given runs outside, after the lock is let go.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Alone, until the block ends; not from within."""
        self._lock.acquire()
        try:
            yield
        finally:
            self._leave()

    def post(self, what: Callable[[], None]) -> None:
        """Run it inside: now, or by whoever is inside now."""
        self._posted.append(what)
        if self._lock.acquire(blocking=False):
            self._leave()

    def later(self, what: Callable[[], None]) -> None:
        """Run it outside, soon. Called from inside."""
        self._later.append(what)

    def _leave(self) -> None:
        """Run what was posted, let go, and look again: a post may have come just before that."""
        while True:
            try:
                while self._posted:
                    self._posted.popleft()()
                after = list(self._later)
                self._later.clear()
            finally:
                self._lock.release()
            for what in after:
                what()
            if not self._posted or not self._lock.acquire(blocking=False):
                return
