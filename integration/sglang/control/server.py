"""The HTTP server of the control channel, in a thread of the scheduler process."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import TracebackType
from typing import Self

import uvicorn

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address, check_token
from kvtier.integration.sglang.control.app import GRACE_S, ControlApp
from kvtier.integration.sglang.control.connection import ControlConfig, Limits
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.listening import Listener

_CONNECTIONS = 256
_GRACEFUL_S = 3  # for answers under way when the server closes
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class ControlServer:
    """Serves the control channel on `address` to whoever has `token`.

    The address is taken when this is constructed and served from `start` on. `timeout_s` is how
    long a request waits for the scheduler thread to drain `inbox`; when it is over, the request is
    cancelled. A client has `receive_s` to send a request's head, and again to send its body.
    Raises ConfigError for a weak token, a time that is not positive, or an address in use.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        inbox: Inbox,
        timeout_s: float = 10.0,
        *,
        receive_s: float = 5.0,
    ) -> None:
        if min(timeout_s, receive_s) <= 0:
            raise ConfigError("times of the control channel must be positive")
        self._inbox = inbox
        app = ControlApp(check_token(token), inbox, timeout_s)
        limits = Limits(_CONNECTIONS, receive_s, answer_s=timeout_s + GRACE_S + receive_s)
        self._server = uvicorn.Server(ControlConfig(app, limits, _GRACEFUL_S))
        self._listener = Listener(address)
        self._thread = threading.Thread(target=self._run, name="kvtier-control", daemon=True)

    @property
    def address(self) -> Address:
        """What is bound, with the real port where 0 was asked for."""
        return self._listener.address

    def start(self) -> None:
        """Serve from now on, in a daemon thread that handles no signals; once only."""
        self._thread.start()

    def close(self) -> None:
        """Answer what waits with 503, close the inbox and the server, remove the socket's file.

        A request that is being carried out still has a few seconds. May be called again.
        """
        self._inbox.close()
        self._server.should_exit = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._listener.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException:  # uvicorn may raise SystemExit
            _log.exception("the control channel on %s ended", self.address)

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._listener.socket])
        state = self._server.server_state
        if state.tasks:  # cancelled by now; they still say so to their clients
            await asyncio.wait(state.tasks, timeout=1.0)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # lets aborted connections close
