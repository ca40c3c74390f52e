"""A control server with a scheduler thread behind it, and clients that misbehave."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import (
    Commands,
    Label,
    Levels,
    LevelsQuestion,
    Reply,
    Request,
    Residencies,
    Residency,
    Result,
    Results,
    Status,
    TierLevel,
)

TOKEN = "0123456789abcdef"
AUTH = f"Authorization: Bearer {TOKEN}\r\n"
LOCAL = Address.parse("127.0.0.1:0")
WAIT_S = 20.0  # for what must happen; a failing test waits for as long

LEVELS = Levels(
    hbm=TierLevel(capacity=100, free=40, evictable=30, protected=20, in_flight=10),
    dram=TierLevel(capacity=200, free=200, evictable=0, protected=0, in_flight=0),
    bytes_per_token=1024,
)
P1 = Residency(
    program="p1",
    epoch=3,
    label=Label.IDLE,
    hbm_private=64,
    dram_private=32,
    shared_group="g",
    shared_tokens=16,
    pinned=False,
    running=1,
)


class Worker:
    """What a scheduler does with requests: remembers them and answers from fixed state."""

    def __init__(self) -> None:
        self.seen: list[Request] = []

    def handle(self, request: Request) -> Reply:
        self.seen.append(request)
        if isinstance(request, Commands):
            # The epoch comes back, so that an answer shows which command it belongs to.
            return Results([Result(Status.DONE, tokens=c.epoch) for c in request.commands])
        if isinstance(request, LevelsQuestion):
            return LEVELS
        known = request.program in (None, P1.program)
        return Residencies([P1] if known else [])

    def epochs(self, program: str) -> list[int]:
        """Epochs of the program's commands, in the order in which they were carried out."""
        batches = (request.commands for request in self.seen if isinstance(request, Commands))
        return [c.epoch for batch in batches for c in batch if c.program == program]


class SchedulerThread:
    """Drains an inbox between its steps, as the engine's loop does."""

    def __init__(self, inbox: Inbox, worker: Worker) -> None:
        self._inbox = inbox
        self._worker = worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self._inbox.drain(self._worker.handle)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def pin(program: str, epoch: int) -> bytes:
    """Body of one command."""
    return json.dumps({"commands": [{"type": "pin", "program": program, "epoch": epoch}]}).encode()


def request_bytes(
    body: bytes = b"",
    *,
    method: str = "POST",
    path: str = "/v1/commands",
    headers: str = AUTH,
    length: int | None = None,
) -> bytes:
    """A whole HTTP request that ends its connection; `length` declares another size of body."""
    declared = len(body) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Length: {declared}\r\n\r\n".encode() + body


def connect(address: Address) -> socket.socket:
    """A raw connection to a server."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WAIT_S)
        sock.connect(address.path)
        return sock
    return socket.create_connection((address.host, address.port), timeout=WAIT_S)


def exchange(address: Address, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the answer to raw bytes."""
    with connect(address) as sock:
        sock.sendall(request)
        return read_answer(sock)


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The one answer on a connection that the server ends after it."""
    received = b""
    while chunk := sock.recv(65536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(status.split()[1]), {name.lower(): value for name, value in pairs}, body


def error_line(body: bytes) -> str:
    """The line of an error, which is all that its JSON holds."""
    answer = json.loads(body)
    assert list(answer) == ["error"]
    assert "\n" not in answer["error"]
    return answer["error"]


def kill(sock: socket.socket) -> None:
    """End a connection as the kernel does for a client that was killed with data unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def until(happened: Callable[[], object]) -> None:
    """Return once `happened` holds; AssertionError where it does not in good time."""
    end = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end


def stall(address: Address, *parts: bytes) -> list[socket.socket]:
    """A connection for each part of a request, with nothing following it."""
    sockets = []
    for part in parts:
        sockets.append(connect(address))
        sockets[-1].sendall(part)
    return sockets


def is_cut(sock: socket.socket) -> bool:
    """Whether the server ends the connection; what it answers before that is read."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True
