"""HTTP connections that cannot be held open by a client that stalls."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

KEEP_ALIVE_S = 5

# Errors of the application pass; what clients do wrong is for them to read, not for the log.
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of connections: how many, and seconds for what a client or the worker does."""

    connections: int
    receive_s: float  # for the head of a request, and again for its body
    answer_s: float  # from the whole request to the whole answer


class ControlConfig(uvicorn.Config):
    """Settings of uvicorn for one control server; changes no logger."""

    def __init__(self, app: ASGIApp, limits: Limits, graceful_s: int) -> None:
        self.limits = limits
        super().__init__(
            app,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            workers=1,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=graceful_s,
        )


class Connection(H11Protocol):
    """uvicorn's connection, aborted when a phase of it (receive, answer, idle) takes too long."""

    def __init__(
        self,
        config: ControlConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _log
        self.access_log = False
        self._limits = config.limits
        self._timer: asyncio.TimerHandle | None = None
        self._receiving = True
        self._idle = False
        self._serve: ASGIApp = self.app
        self.app = self._timed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self._start_receiving()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._start_receiving()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection: at once, or after the answer where a whole request is in."""
        if self._receiving:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP; what the application may still say of the request goes nowhere."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.ProtocolError:  # the request has been answered already
            self.transport.abort()

    async def _timed(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._start_receiving()

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._receiving = False
                self._abort_after(self._limits.answer_s)
            return message

        try:
            await self._serve(scope, received, send)
        finally:
            self._receiving, self._idle = False, True
            # uvicorn closes idle connections, but would wait for ever for an answer to be read.
            self._abort_after(2 * KEEP_ALIVE_S)

    def _start_receiving(self) -> None:
        self._receiving, self._idle = True, False
        self._abort_after(self._limits.receive_s)

    def _abort_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)
