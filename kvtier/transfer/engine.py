"""`TransferEngine`: the core with a clock, a lock and a backend."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from threading import Condition, Lock
from types import TracebackType
from typing import Self

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.backend import Backend
from kvtier.transfer.core import TransferCore
from kvtier.transfer.job import Chunk, Job, PageIds, Priority, Ready
from kvtier.transfer.metrics import Sample, samples
from kvtier.transfer.window import Window

_POLL_S = 50e-6  # between two looks at a polled backend that somebody waits for


class TransferEngine:
    """Moves pages between the pools of a backend; any thread may call it at any time.

    A job's copy goes on by itself where the backend has threads; a polled one goes on in `poll`,
    `wait` and `drain`. Futures resolve at the job's end, with or without `poll`, in whichever
    thread noticed it: callbacks must be short, and must not wait for other jobs. `chunk_bytes`,
    `windows` and the rules by which jobs are ordered: see TransferCore. `clock` gives seconds that
    never go back.

    Callers keep `reserve_bytes` free in each tier, one chunk: whoever has to make room for a copy
    then has where to begin, and when both tiers are full but for that, drops instead of waiting.

    With `reports` false, `poll` returns no jobs: choose this where futures alone are used, or jobs
    that ended pile up for it.

    A context manager: left normally it waits for all jobs (`drain`), left by an exception it only
    waits for the chunks in flight (`close`).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chunk_bytes: int,
        windows: Mapping[Direction, Window],
        clock: Callable[[], float] = time.monotonic,
        reports: bool = True,
    ) -> None:
        self.backend = backend
        self.reserve_bytes = chunk_bytes
        self._core = TransferCore(backend.geometry, chunk_bytes=chunk_bytes, windows=windows)
        self._clock = clock
        self._reports: deque[Job] | None = deque() if reports else None
        self._lock = Lock()  # of the core and all below
        self._idle = Condition(self._lock)
        self._num_draining = 0
        self._endings: deque[tuple[Chunk, Exception | None]] = deque()
        self._to_start: deque[Chunk] = deque()
        self._to_resolve: deque[Job] = deque()
        self._stale = False  # something changed since chunks were issued
        self._advancing = False
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.drain()
        finally:
            self.close()

    def submit(
        self,
        direction: Direction,
        source_pages: PageIds,
        target_pages: PageIds,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
        after: Sequence[Job] = (),
        layerwise: bool = False,
        ready: Ready | None = None,
    ) -> Job:
        """Start to copy pages as soon as order and windows allow. See Job for the arguments.

        Raises TransferError, with nothing changed, as Job and TransferCore.submit do, and once
        closed.
        """
        job = Job(
            direction,
            source_pages,
            target_pages,
            priority=priority,
            deadline_s=deadline_s,
            after=after,
            layerwise=layerwise,
            ready=ready,
        )
        self._check_process()
        with self._lock:
            if self._closed:
                raise TransferError("this transfer engine is closed; make another one")
            self._core.submit(job, self._clock())
        self._advance()
        return job

    def cancel(self, job: Job) -> bool:
        """End the job CANCELLED; at once, or as soon as its chunks in flight have ended.

        Until then its pages stay in use. False where it has ended, or is about to end FAILED.
        """
        with self._lock:
            cancelled = self._core.cancel(job, self._clock())
        self._advance()
        return cancelled

    def raise_priority(self, job: Job, priority: Priority, deadline_s: float | None = None) -> None:
        """Make the job, and those it waits for, as urgent as that; never less urgent."""
        with self._lock:
            self._core.raise_priority(job, priority, deadline_s)
        self._advance()

    def poll(self) -> list[Job]:
        """The jobs that ended since the last poll, each once. Cheap where nothing happened."""
        if self.backend.polled and self._core.num_live:
            self.backend.poll()
        if not self._reports:
            return []
        with self._lock:
            ended = list(self._reports)
            self._reports.clear()
        return ended

    def wait(self, jobs: Iterable[Job], timeout_s: float | None = None) -> bool:
        """Wait until all of these jobs have ended, however they did; False after `timeout_s`.

        Not from a callback of a future.
        """
        self._check_process()
        waiting = [job.future for job in jobs]
        if not self.backend.polled:
            return not futures.wait(waiting, timeout_s).not_done
        return self._poll_until(lambda: all(future.done() for future in waiting), timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is live; False after `timeout_s`. Not from a callback of a future."""
        self._check_process()
        if self.backend.polled:
            return self._poll_until(self._settled, timeout_s)
        with self._idle:
            self._num_draining += 1
            try:
                return self._idle.wait_for(self._settled, timeout_s)
            finally:
                self._num_draining -= 1

    def close(self) -> None:
        """Cancel all jobs, wait for their chunks in flight, close the backend. Twice is fine.

        Chunks in flight cannot be called back; a job with all of its chunks in flight is cancelled
        as well. In a forked child nothing is left to close: jobs and threads are the parent's.
        """
        if os.getpid() != self._process:
            self._closed = True
            return
        with self._lock:
            self._closed = True
            for job in self._core.live_jobs():
                self._core.cancel(job, self._clock())
        self._advance()
        self.drain()
        self.backend.close()

    def metrics(self) -> list[Sample]:
        """Counters and gauges at one moment."""
        with self._lock:
            return samples(self._core, self.backend.path_name)

    def check_integrity(self) -> None:
        """Raise TransferError unless pages, bytes and jobs add up. O(pages of the pools)."""
        with self._lock:
            self._core.check_integrity()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise TransferError("this transfer engine is the parent process's; make one in each")

    def _settled(self) -> bool:
        """Whether all jobs have ended, their futures included."""
        return not self._core.num_live and not self._advancing

    def _done(self, chunk: Chunk, error: Exception | None) -> None:
        self._endings.append((chunk, error))
        self._advance()

    def _advance(self) -> None:
        """Take note of what ended, start what may start, until there is neither.

        One thread does it at a time, so that chunks start in the order in which they were issued;
        whoever comes meanwhile leaves it to that thread.
        """
        with self._lock:
            self._stale = True
            if self._advancing:
                return
            self._advancing = True
        interrupt: BaseException | None = None
        try:
            while self._take_note():
                self._start_chunks()
                interrupt = self._resolve() or interrupt
        except BaseException:
            # An interrupt. Whoever comes next goes on with `_to_start` and `_to_resolve`.
            self._advancing = False
            raise
        if interrupt is not None:
            raise interrupt

    def _take_note(self) -> bool:
        """Whether there was something to do; if not, this thread has stopped."""
        with self._lock:
            if not self._stale and not self._endings:
                self._advancing = False
                if self._num_draining and self._settled():
                    self._idle.notify_all()
                return False
            self._stale = False
            core, now_s = self._core, self._clock()
            ended = core.take_ended()
            while self._endings:
                chunk, error = self._endings.popleft()
                ended += core.ended(chunk, now_s, error)
            self._to_start.extend(core.issue(now_s))
            self._to_resolve.extend(ended)
            if self._reports is not None:
                self._reports.extend(ended)
            return True

    def _resolve(self) -> BaseException | None:
        """Resolve the futures of what ended; what their callbacks raise must not stop the rest."""
        interrupt: BaseException | None = None
        again: Job | None = None
        while self._to_resolve:
            job = self._to_resolve[0]
            try:
                job.resolve()
            except BaseException as error:  # callbacks' Exceptions are logged by the future
                interrupt = error
                if again is not job:
                    again = job  # its future has a result by now, or gets one
                    continue
            self._to_resolve.popleft()
        return interrupt

    def _start_chunks(self) -> None:
        while self._to_start:
            chunk = self._to_start[0]
            try:
                self.backend.start(chunk, partial(self._done, chunk))
            except Exception as error:
                self._endings.append((chunk, error))
            # Not before: a chunk whose start was interrupted is started again.
            self._to_start.popleft()

    def _poll_until(self, over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Poll the backend; jobs that end meanwhile are reported by the next `poll`."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not over():
            if give_up_s is not None and time.monotonic() >= give_up_s:
                return False
            self.backend.poll()
            time.sleep(_POLL_S)
        return True
