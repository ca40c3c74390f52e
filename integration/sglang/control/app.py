"""The routes of the control channel: HTTP in, requests into the inbox, answers out."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.errors import KvtierError
from kvtier.integration.sglang.control.errors import ChannelBusy, ChannelClosed
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import (
    Commands,
    LevelsQuestion,
    ProgramId,
    Reply,
    Request,
    ResidencyQuestion,
)

MAX_BODY_BYTES = 1 << 20
# A client that still sends when its connection ends may not see the answer, so a body that is
# somewhat too large is read to its end.
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
MAX_WAITING = 64  # requests of this server that wait for the scheduler thread
GRACE_S = 2.0  # for a request that is being carried out when its time is up

Parse: TypeAlias = Callable[[HttpRequest, bytes], Request]
Endpoint: TypeAlias = Callable[[HttpRequest], Coroutine[Any, Any, Response]]


class ControlApp:
    """ASGI application over one inbox; `timeout_s` is for the scheduler thread to take a request.

    Every answer is JSON, an error is {"error": "one line"}.
    """

    def __init__(self, token: str, inbox: Inbox, timeout_s: float) -> None:
        self._token = token.encode("ascii")
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._waiting = 0
        self._routes = Starlette(
            routes=[
                Route("/v1/commands", self._endpoint(_commands), methods=["POST"]),
                Route("/v1/residency", self._endpoint(_residency), methods=["GET"]),
                Route("/v1/levels", self._endpoint(_levels), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _own_error},
        )
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; without the token it learns nothing, not even which routes exist."""
        if self._authorised(scope):
            await self._routes(scope, receive, send)
            return
        refusal = _error(401, "the bearer token is missing or wrong")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        await refusal(scope, receive, send)

    def _authorised(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        right = hmac.compare_digest(token.strip(), self._token)
        return right and scheme.lower() == b"bearer"

    def _endpoint(self, parse: Parse) -> Endpoint:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                request = parse(http, await _body(http))
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                return _error(400, str(error))
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            return await self._ask(request)

        return endpoint

    async def _ask(self, request: Request) -> Response:
        if self._waiting >= MAX_WAITING:
            return _error(503, f"{MAX_WAITING} requests wait for the scheduler; ask again later")
        try:
            future = self._inbox.submit(request)
        except (ChannelBusy, ChannelClosed) as error:
            return _error(503, str(error))
        self._waiting += 1
        try:
            return await self._outcome(future)
        finally:
            self._waiting -= 1

    async def _outcome(self, future: Future[Reply]) -> Response:
        reply = asyncio.wrap_future(future)
        try:
            await asyncio.wait({reply}, timeout=self._timeout_s)
            if reply.done():
                return _answer(reply)
            if future.cancel():
                return _error(504, "the scheduler did not take the request; it will not happen")
            await asyncio.wait({reply}, timeout=GRACE_S)
        except asyncio.CancelledError:  # the server ends
            reply.cancel()
            return _error(503, "the control channel closes; whether the request happens is unknown")
        if reply.done():
            return _answer(reply)
        reply.cancel()
        return _error(504, "the scheduler is still at the request; how it ends is unknown")


def _commands(_: HttpRequest, body: bytes) -> Request:
    return msgspec.json.decode(body, type=Commands)


def _residency(http: HttpRequest, _: bytes) -> Request:
    given = http.query_params.multi_items()
    for name, _value in given:
        if name != "program":
            raise msgspec.ValidationError(f"unknown query parameter {name!r}, known: 'program'")
    if len(given) > 1:
        raise msgspec.ValidationError("query parameter 'program' is given more than once")
    try:
        return ResidencyQuestion(*(msgspec.convert(value, ProgramId) for _, value in given))
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"query parameter 'program': {error}") from error


def _levels(_: HttpRequest, __: bytes) -> Request:
    return LevelsQuestion()


async def _body(http: HttpRequest) -> bytes:
    size = int(http.headers.get("content-length", "0"))
    body = bytearray()
    if size <= MAX_DISCARDED_BYTES:
        size = 0
        async for chunk in http.stream():
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                body += chunk
            elif size > MAX_DISCARDED_BYTES:
                break
    if size > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _answer(reply: asyncio.Future[Reply]) -> Response:
    error = reply.exception()
    if error is None:
        return _json(200, reply.result())
    if isinstance(error, ChannelClosed):
        return _error(503, str(error))
    if isinstance(error, KvtierError):
        return _error(500, str(error))
    return _error(500, f"the request failed in the scheduler: {type(error).__name__}: {error}")


def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


def _own_error(_: HttpRequest, error: Exception) -> Response:
    return _error(500, f"the control channel failed: {type(error).__name__}")


def _error(status: int, line: str) -> Response:
    return _json(status, {"error": " ".join(line.split())})


def _json(status: int, content: object) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, media_type="application/json")
