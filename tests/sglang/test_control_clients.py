"""The control channel among clients that stall, die or come in numbers."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.integration.sglang.control import connection
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.app import MAX_WAITING
from kvtier.integration.sglang.control.client import ControlClient
from kvtier.integration.sglang.control.errors import ControlError
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import Commands, Pin, Reply, Request, Residencies
from kvtier.integration.sglang.control.server import ControlServer

from .channel import (
    LEVELS,
    LOCAL,
    P1,
    TOKEN,
    WAIT_S,
    SchedulerThread,
    Worker,
    connect,
    is_cut,
    kill,
    pin,
    read_answer,
    request_bytes,
    stall,
    until,
)

WHOLE = request_bytes(pin("p", 1))
HEAD_ONLY = request_bytes(length=100)
STALLS = {
    "silence": b"",
    "half a line": b"POST /v1/comm",
    "half a head": WHOLE[:60],
    "head without body": HEAD_ONLY,
    "half a body": WHOLE[:-5],
    "no token, half a body": request_bytes(b"x", headers="", length=100),
    "half a question": request_bytes(b"x", method="GET", path="/v1/levels", length=100),
}


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def server(inbox: Inbox) -> Iterator[ControlServer]:
    with ControlServer(LOCAL, TOKEN, inbox) as served:
        yield served


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    with ControlClient(server.address, TOKEN, WAIT_S) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def test_clients_that_stall_block_neither_others_nor_the_scheduler(
    server: ControlServer, client: ControlClient, inbox: Inbox, worker: Worker
) -> None:
    stalled = stall(server.address, *(part for part in STALLS.values() for _ in range(12)))
    assert inbox.drain(worker.handle) == 0
    with SchedulerThread(inbox, worker):
        assert client.send(Pin("others", 5))[0].tokens == 5
    assert worker.seen == [Commands([Pin("others", 5)])]
    for sock in stalled:
        sock.close()


@pytest.mark.parametrize("part", STALLS.values(), ids=STALLS)
def test_a_client_that_stalls_is_cut_off(inbox: Inbox, part: bytes) -> None:
    with ControlServer(LOCAL, TOKEN, inbox, receive_s=0.2) as server:
        (sock,) = stall(server.address, part)
        with sock:
            assert is_cut(sock)
        assert len(inbox) == 0


def test_a_client_that_sends_a_byte_at_a_time_is_cut_off_too(inbox: Inbox) -> None:
    def drip() -> None:
        for byte in WHOLE * 1000:
            sock.sendall(bytes([byte]))
            pause.wait(0.02)

    pause = threading.Event()
    with ControlServer(LOCAL, TOKEN, inbox, receive_s=0.2) as server:
        with connect(server.address) as sock, pytest.raises(ConnectionError):
            drip()
        assert len(inbox) == 0


def test_a_client_that_does_not_read_its_answer_is_cut_off(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.1)
    large = Residencies([P1] * 200_000)
    path = Address(path=str(tmp_path / "s"))  # over TCP, the end would stay behind unread data
    with ControlServer(path, TOKEN, inbox), connect(path) as sock:
        sock.sendall(request_bytes(method="GET", path="/v1/residency"))
        until(lambda: inbox.drain(lambda _: large))
        ended = select.poll()
        ended.register(sock, select.POLLHUP)
        assert ended.poll(WAIT_S * 1000)


def test_more_connections_than_fit_are_ended_at_once_and_others_fit_again_later(
    server: ControlServer, client: ControlClient, inbox: Inbox, worker: Worker
) -> None:
    stalled = stall(server.address, *[b""] * 256)
    with connect(server.address) as one_too_many:
        assert is_cut(one_too_many)
    for sock in stalled:
        sock.close()

    def served() -> bool:
        try:
            return client.levels() == LEVELS
        except ControlError:  # the server has not seen all ends yet
            return False

    with SchedulerThread(inbox, worker):
        until(served)


def test_a_connection_serves_one_request_after_another(
    server: ControlServer, inbox: Inbox, worker: Worker
) -> None:
    kept = b"".join(
        request_bytes(pin("p", epoch)).replace(b"Connection: close\r\n", b"") for epoch in range(20)
    )
    with SchedulerThread(inbox, worker), connect(server.address) as sock:
        sock.sendall(kept + request_bytes(pin("p", 20)))
        read_answer(sock)
    assert worker.epochs("p") == list(range(21))


@pytest.mark.parametrize("end", [socket.socket.close, kill])
@pytest.mark.parametrize(
    ("part", "possible"),
    [(WHOLE, ([], [1])), (WHOLE[:-1], ([],)), (WHOLE[:50], ([],))],
    ids=["whole", "all but a byte", "half a head"],
)
def test_a_command_of_a_client_that_dies_happens_once_or_never(
    server: ControlServer,
    client: ControlClient,
    inbox: Inbox,
    worker: Worker,
    end: Callable[[socket.socket], None],
    part: bytes,
    possible: tuple[list[int], ...],
) -> None:
    (dying,) = stall(server.address, part)
    end(dying)
    with SchedulerThread(inbox, worker):
        assert client.send(Pin("q", 2))[0].tokens == 2
    assert worker.epochs("p") in possible
    assert worker.epochs("q") == [2]


@pytest.mark.parametrize("end", [socket.socket.close, kill])
def test_a_command_happens_once_when_its_client_dies_while_it_is_carried_out(
    server: ControlServer,
    client: ControlClient,
    inbox: Inbox,
    worker: Worker,
    end: Callable[[socket.socket], None],
) -> None:
    (dying,) = stall(server.address, WHOLE)

    def handle(request: Request) -> Reply:
        end(dying)
        return worker.handle(request)

    until(lambda: inbox.drain(handle))
    with SchedulerThread(inbox, worker):
        assert client.send(Pin("q", 2))[0].tokens == 2
    assert worker.epochs("p") == [1]


def test_a_client_process_that_is_killed_leaves_its_command_done_once_and_the_server_alive(
    server: ControlServer, client: ControlClient, inbox: Inbox, worker: Worker
) -> None:
    code = (
        "import socket, sys, time\n"
        "sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "sock.sendall(bytes.fromhex(sys.argv[2]))\n"
        "sock.recv(1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(server.address.port), WHOLE.hex()])
    until(lambda: len(inbox))
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    with SchedulerThread(inbox, worker):
        assert client.send(Pin("q", 2))[0].tokens == 2
    assert worker.epochs("p") == [1]


def test_the_order_of_commands_is_kept_within_and_between_requests(
    client: ControlClient, inbox: Inbox, worker: Worker
) -> None:
    with SchedulerThread(inbox, worker):
        for first in (0, 1000, 1001, 2025):
            size = {0: 1000, 1000: 1, 1001: 1024, 2025: 5}[first]
            sent = [Pin("p", first + index) for index in range(size)]
            assert [result.tokens for result in client.send(*sent)] == [c.epoch for c in sent]
    assert worker.epochs("p") == list(range(2030))


def test_many_clients_at_once_get_their_own_answers_each(
    server: ControlServer, inbox: Inbox, worker: Worker, pool: ThreadPoolExecutor
) -> None:
    def chat(number: int) -> None:
        with ControlClient(server.address, TOKEN, WAIT_S) as client:
            for turn in range(15):
                epoch = 1000 * number + turn
                assert client.send(Pin(f"p{number}", epoch))[0].tokens == epoch

    with SchedulerThread(inbox, worker):
        list(pool.map(chat, range(24)))
    for number in range(24):
        assert worker.epochs(f"p{number}") == [1000 * number + turn for turn in range(15)]


def test_beyond_64_waiting_requests_further_ones_are_refused_and_those_are_answered(
    server: ControlServer, inbox: Inbox, worker: Worker
) -> None:
    sockets = stall(server.address, *[WHOLE] * (MAX_WAITING + 6))
    until(lambda: len(select.select(sockets, [], [], WAIT_S)[0]) == 6)
    refused = select.select(sockets, [], [], 0)[0]
    assert len(inbox) == MAX_WAITING
    with SchedulerThread(inbox, worker):
        statuses = {sock: read_answer(sock)[0] for sock in sockets}
    assert Counter(statuses.values()) == {200: MAX_WAITING, 503: 6}
    assert {statuses[sock] for sock in refused} == {503}
    for sock in sockets:
        sock.close()
