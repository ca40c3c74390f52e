"""Hands requests from any thread to the scheduler thread, which never waits for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from kvtier.integration.sglang.control.errors import ChannelBusy, ChannelClosed
from kvtier.integration.sglang.control.protocol import Reply, Request

_log = logging.getLogger(__name__)


class Inbox:
    """A bounded queue of requests, answered in the order of their arrival.

    A future that is cancelled before its request is taken is never handed over; once taken, it
    cannot be cancelled any more. So `future.cancel()` returning True means "will not happen".
    """

    def __init__(self, max_waiting: int = 1024) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Request, Future[Reply]]] = deque()
        self._lock = threading.Lock()  # among those who submit or close; `drain` does without
        self._closed = False

    def submit(self, request: Request) -> Future[Reply]:
        """The future answer to `request`; its exception is what the handler raised.

        Raises ChannelBusy where `max_waiting` requests wait (cancelled ones count until the
        scheduler thread passes them), ChannelClosed after `close`.
        """
        future: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                raise _closed()
            if len(self._waiting) >= self._max_waiting:
                raise ChannelBusy(
                    f"{self._max_waiting} requests wait for the scheduler already; ask again later"
                )
            self._waiting.append((request, future))
        return future

    def drain(self, handle: Callable[[Request], Reply], limit: int = 64) -> int:
        """Answer at most `limit` waiting requests with `handle`; how many were taken.

        For one thread, the scheduler's. Takes no lock, waits for nobody, and leaves what arrives
        meanwhile for the next call. What `handle` raises becomes the answer and is logged.
        """
        taken = 0
        for _ in range(len(self._waiting)):
            if taken >= limit:
                break
            try:
                request, future = self._waiting.popleft()
            except IndexError:  # closed meanwhile
                break
            if future.set_running_or_notify_cancel():
                taken += 1
                _answer(future, request, handle)
        return taken

    def __len__(self) -> int:
        """How many requests wait, cancelled ones included."""
        return len(self._waiting)

    def close(self) -> None:
        """Fail what waits, and every later `submit`, with ChannelClosed."""
        with self._lock:
            self._closed = True
        while self._waiting:
            try:
                _, future = self._waiting.popleft()
            except IndexError:  # drained meanwhile
                break
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())


def _answer(future: Future[Reply], request: Request, handle: Callable[[Request], Reply]) -> None:
    try:
        reply = handle(request)
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
        _log.exception("control request %s failed", type(request).__name__)
    else:
        future.set_result(reply)


def _closed() -> ChannelClosed:
    return ChannelClosed("the control channel is closed; the request was not carried out")
