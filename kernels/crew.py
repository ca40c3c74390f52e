"""Threads that share out the parts of a copy with its caller, and are done when it returns."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Lock

Part = Callable[[], None]

_generation = 0  # how many forks lie behind this process; a pid may come again in a later child


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class Crew:
    """`num_helpers` threads, started when first needed; any number of callers at a time.

    A forked child has none of its parent's threads, and finds its locks as they were: it gets
    threads of its own at its first call.
    """

    def __init__(self, num_helpers: int) -> None:
        self._num_helpers = num_helpers
        self._closed = False
        self._teams: dict[int, _Team] = {}

    def __del__(self) -> None:
        for team in self._teams.values():
            team.calls.put(None)

    def run(self, parts: Iterable[Part], num_helpers: int) -> None:
        """Run the parts here and on up to `num_helpers` threads, each taking the next one.

        Whoever is slowed down takes fewer: a busy thread, or a busy core, holds nobody up. When
        this returns or raises, no part runs any more, however often it is interrupted meanwhile;
        then it raises the first interrupt, or the first error of a part.
        """
        shared = _Shared(parts)
        failure: BaseException | None = None
        settled = False
        # All in this frame, and the loop twice: an interrupt can come at every call and jump, so
        # that a call in a handler, or one loop alone, would let it out before the parts ended.
        while not settled:
            try:
                while not settled:
                    try:
                        if failure is None:
                            self._call(shared, num_helpers)
                            shared.work()
                        shared.join()
                        settled = True
                    except BaseException as error:
                        shared.stopped = True
                        failure = error if failure is None else failure
            except BaseException as error:
                shared.stopped = True
                failure = error if failure is None else failure
        failure = shared.error if failure is None else failure
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback holds this frame

    def close(self) -> None:
        """End the threads of this process once they are done with their parts.

        What runs or comes later is done by its caller alone.
        """
        self._closed = True
        team = self._teams.get(_generation)
        if team is not None:
            team.end()

    def _call(self, shared: _Shared, num_helpers: int) -> None:
        if not num_helpers or self._closed:
            return
        team = self._teams.get(_generation)
        if team is None:
            team = self._teams.setdefault(_generation, _Team(self._num_helpers))
        team.start()
        for _ in range(num_helpers):
            team.calls.put(shared)


class _Team:
    """The threads of one process.

    Without the threads and executors of the standard library: a caller that is interrupted while
    it starts or calls them can leave their locks held for ever.
    """

    def __init__(self, num_threads: int) -> None:
        self.calls: SimpleQueue[_Shared | None] = SimpleQueue()
        self._missing = deque(range(num_threads))
        self._serving: list[Lock] = []

    def start(self) -> None:
        """Start what is missing, as far as the system lets it: the caller can do without."""
        while self._missing:
            try:
                at = self._missing.pop()
            except IndexError:
                return  # another caller starts it
            try:
                start_new_thread(_serve, (self.calls, self._serving))
            except RuntimeError:
                self._missing.append(at)
                return

    def end(self) -> None:
        """Wait until each has done what it was called to, and has ended."""
        self.calls.put(None)
        for serving in self._serving:
            with serving:
                pass


def _serve(calls: SimpleQueue[_Shared | None], serving: list[Lock]) -> None:
    """What a thread does. It knows no Team or Crew, so that it ends when they are dropped."""
    mine = Lock()
    with mine:
        serving.append(mine)
        while (shared := calls.get()) is not None:
            shared.help()
            del shared  # its memory must not wait for the next call
        calls.put(None)  # for the next thread


class _Shared:
    """The parts of one copy. Without locks that its caller could leave held when interrupted."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.stopped = False
        self.error: BaseException | None = None
        self._waiting = deque(parts)
        self._helping: list[Lock] = []

    def work(self) -> None:
        """Take part after part until none is left or the copy has stopped."""
        while not self.stopped:
            try:
                part = self._waiting.popleft()
            except IndexError:
                return
            part()

    def help(self) -> None:
        """`work` on a thread. It shows that it is there before it looks whether to stop."""
        working = Lock()
        with working:
            self._helping.append(working)
            try:
                self.work()
            except BaseException as error:
                self.stopped = True
                self.error = self.error or error

    def join(self) -> None:
        """Let nobody begin another part, and wait for those that run."""
        self.stopped = True
        for working in self._helping:
            with working:
                pass
