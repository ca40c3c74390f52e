"""Start and end of a control server: addresses, socket files, signals, logs; odd servers."""

from __future__ import annotations

import logging
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.client import ControlClient
from kvtier.integration.sglang.control.errors import ChannelClosed, ControlError
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import LevelsQuestion, Pin, Reply, Request
from kvtier.integration.sglang.control.server import ControlServer

from .channel import (
    AUTH,
    LEVELS,
    LOCAL,
    TOKEN,
    WAIT_S,
    SchedulerThread,
    Worker,
    connect,
    exchange,
    is_cut,
    pin,
    request_bytes,
    stall,
    until,
)


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
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def at(path: Path) -> Address:
    return Address.parse(f"unix:{path}")


def is_closed(inbox: Inbox) -> bool:
    try:
        inbox.submit(LevelsQuestion()).cancel()
    except ChannelClosed:
        return True
    return False


def test_closing_answers_what_waits_and_lets_nothing_happen_later(
    server: ControlServer,
    client: ControlClient,
    inbox: Inbox,
    worker: Worker,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (stalled,) = stall(server.address, request_bytes(length=100))
    answer = pool.submit(client.send, Pin("p", 1))
    until(lambda: len(inbox))
    server.close()
    assert caplog.record_tuples == []  # nothing had to be cancelled
    with pytest.raises(ControlError, match="was not carried out") as raised:
        answer.result(WAIT_S)
    assert raised.value.status == 503
    assert is_cut(stalled)
    stalled.close()
    assert inbox.drain(worker.handle) == 0
    assert worker.seen == []
    server.close()
    with pytest.raises(ControlError, match="cannot reach a worker") as raised:
        client.levels()
    assert raised.value.status is None


def test_closing_waits_for_a_request_that_is_being_carried_out(
    server: ControlServer, client: ControlClient, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    answer = pool.submit(client.levels)

    def handle(_: Request) -> Reply:
        closing = pool.submit(server.close)
        until(lambda: is_closed(inbox))
        assert not closing.done()
        return LEVELS

    until(lambda: inbox.drain(handle))
    assert answer.result(WAIT_S) == LEVELS


def test_closing_does_not_wait_for_ever_for_a_request_that_is_being_carried_out(
    server: ControlServer, client: ControlClient, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    answer = pool.submit(client.levels)

    def stuck(_: Request) -> Reply:
        server.close()
        return LEVELS

    until(lambda: inbox.drain(stuck))
    with pytest.raises(ControlError, match="whether the request happens is unknown") as raised:
        answer.result(WAIT_S)
    assert raised.value.status == 503


def test_a_socket_file_is_for_its_owner_alone_and_goes_with_the_server(path: Path) -> None:
    server = ControlServer(at(path), TOKEN, Inbox())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_server_that_was_never_started_gives_its_address_back(path: Path) -> None:
    unix, local = (ControlServer(where, TOKEN, Inbox()) for where in (at(path), LOCAL))
    unix.close()
    local.close()
    assert not path.exists()
    with ControlServer(local.address, TOKEN, Inbox()) as again:
        assert again.address == local.address


def test_the_socket_file_of_a_dead_server_is_replaced(
    path: Path, inbox: Inbox, worker: Worker
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    with (
        ControlServer(at(path), TOKEN, inbox),
        SchedulerThread(inbox, worker),
        ControlClient(at(path), TOKEN) as client,
    ):
        assert client.levels() == LEVELS


def test_a_live_server_keeps_its_socket_file(path: Path, inbox: Inbox, worker: Worker) -> None:
    with (
        ControlServer(at(path), TOKEN, inbox),
        SchedulerThread(inbox, worker),
        ControlClient(at(path), TOKEN) as client,
    ):
        with pytest.raises(ConfigError, match="a server is listening there"):
            ControlServer(at(path), TOKEN, Inbox())
        assert client.levels() == LEVELS


def test_of_servers_that_start_together_on_one_path_one_wins(
    path: Path, pool: ThreadPoolExecutor
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    def open_server(_: int) -> ControlServer | None:
        start.wait(WAIT_S)
        try:
            return ControlServer(at(path), TOKEN, Inbox())
        except ConfigError:
            return None

    start = threading.Barrier(4)
    won = [server for server in pool.map(open_server, range(4)) if server is not None]
    assert len(won) == 1
    with connect(at(path)):
        won[0].close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        ControlServer(at(path), TOKEN, Inbox())
    assert path.read_text() == "precious"


def test_a_socket_file_that_another_server_has_put_there_is_left_alone(path: Path) -> None:
    first = ControlServer(at(path), TOKEN, Inbox())
    path.rename(path.with_suffix(".old"))
    second = ControlServer(at(path), TOKEN, Inbox())
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["port", "folder"])
def test_an_address_that_cannot_be_had_is_refused_in_one_line(
    kind: str, server: ControlServer, tmp_path: Path
) -> None:
    wanted = server.address if kind == "port" else at(tmp_path / "missing" / "s")
    with pytest.raises(ConfigError, match="cannot open the control channel on") as raised:
        ControlServer(wanted, TOKEN, Inbox())
    assert str(wanted) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("weak", [{"token": "short"}, {"timeout_s": 0.0}, {"receive_s": -1.0}])
def test_wrong_settings_are_refused_before_anything_is_bound(
    path: Path, weak: dict[str, object]
) -> None:
    with pytest.raises(ConfigError):
        ControlServer(**({"address": at(path), "token": TOKEN, "inbox": Inbox()} | weak))
    assert not path.exists()


def test_a_port_can_be_served_again_at_once(inbox: Inbox, worker: Worker) -> None:
    with ControlServer(LOCAL, TOKEN, inbox) as first, SchedulerThread(inbox, worker):
        assert exchange(first.address, request_bytes(pin("p", 1)))[0] == 200
    with ControlServer(first.address, TOKEN, Inbox()) as second:
        assert second.address == first.address


def logging_state() -> list[object]:
    names = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
    loggers = [logging.getLogger(name) for name in names]
    return [(log.level, log.propagate, log.disabled, list(log.handlers)) for log in loggers]


def test_signals_and_logging_of_the_process_stay_as_they_were(inbox: Inbox, worker: Worker) -> None:
    handled = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in handled], logging_state()
    with ControlServer(LOCAL, TOKEN, inbox) as server, SchedulerThread(inbox, worker):
        assert exchange(server.address, request_bytes(pin("p", 1)))[0] == 200
        assert ([signal.getsignal(number) for number in handled], logging_state()) == before
    assert ([signal.getsignal(number) for number in handled], logging_state()) == before


UPGRADE = f"{AUTH}Connection: upgrade\r\nUpgrade: websocket\r\n"
BROKEN_TAIL = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
BROKEN_BODY = BROKEN_TAIL.replace(b"Host: x\r\n", b"Host: x\r\n" + AUTH.encode())


@pytest.mark.parametrize(
    "request_sent",
    [
        request_bytes(pin("p", 1)),
        request_bytes(pin("p", 1), headers=""),
        request_bytes(b"{"),
        request_bytes(path="/nothing"),
        request_bytes(pin("p", 1), headers=UPGRADE),
        b"garbage\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x" * 200_000,
        BROKEN_TAIL,
        BROKEN_BODY,
        BROKEN_BODY.replace(b"POST / ", b"POST /v1/commands "),
    ],
)
def test_no_request_leaves_a_line_in_the_log(
    inbox: Inbox, worker: Worker, caplog: pytest.LogCaptureFixture, request_sent: bytes
) -> None:
    with (
        ControlServer(LOCAL, TOKEN, inbox, receive_s=1.0) as server,
        SchedulerThread(inbox, worker),
    ):
        exchange(server.address, request_bytes(pin("q", 1)))
        with caplog.at_level(logging.DEBUG):
            caplog.clear()
            with connect(server.address) as sock:
                sock.sendall(request_sent)
                assert is_cut(sock)
            assert exchange(server.address, request_bytes(pin("q", 2)))[0] == 200
            assert caplog.record_tuples == []


def test_broken_http_behind_an_answer_ends_the_connection_without_a_line_in_the_log(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), connect(server.address) as sock:
        sock.sendall(BROKEN_TAIL.removesuffix(b"zz\r\n"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")
        sock.sendall(b"zz\r\n")
        assert is_cut(sock)
    assert caplog.record_tuples == []


def test_a_proxy_of_the_environment_is_not_asked(
    server: ControlServer, inbox: Inbox, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with SchedulerThread(inbox, worker), ControlClient(server.address, TOKEN) as client:
        assert client.levels() == LEVELS


@pytest.mark.parametrize(
    ("answer", "line", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "answered something else", 200),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"results":[]}', "0 results", 200),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nhi", "HTTP 502 Bad Gateway", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhi", "whether the request happened", None),
        (b"garbage\r\n\r\n", "whether the request happened is unknown", None),
        (b"", "whether the request happened is unknown", None),
    ],
)
def test_a_client_reports_odd_answers_as_one_line(
    pool: ThreadPoolExecutor, answer: bytes, line: str, status: int | None
) -> None:
    def serve() -> None:
        connection, _ = odd.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as odd:
        pool.submit(serve)
        address = Address(host="127.0.0.1", port=odd.getsockname()[1])
        with (
            ControlClient(address, TOKEN) as client,
            pytest.raises(ControlError, match=line) as raised,
        ):
            client.send(Pin("p", 1))
    assert raised.value.status == status
    assert "\n" not in str(raised.value)


def test_a_client_gives_up_on_a_server_that_stays_mute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address(host="127.0.0.1", port=mute.getsockname()[1])
        with (
            ControlClient(address, TOKEN, timeout_s=0.2) as client,
            pytest.raises(ControlError, match="ReadTimeout") as raised,
        ):
            client.levels()
    assert raised.value.status is None
