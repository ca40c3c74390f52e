"""The control channel over real sockets: answers, refusals, and clients that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.app import MAX_BODY_BYTES
from kvtier.integration.sglang.control.client import ControlClient
from kvtier.integration.sglang.control.errors import ControlError
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import (
    Commands,
    Demote,
    Label,
    LevelsQuestion,
    Pin,
    Release,
    Reply,
    Request,
    ResidencyQuestion,
    Result,
    SetLabel,
    Status,
)
from kvtier.integration.sglang.control.server import ControlServer

from .channel import (
    AUTH,
    LEVELS,
    LOCAL,
    P1,
    TOKEN,
    WAIT_S,
    SchedulerThread,
    Worker,
    error_line,
    exchange,
    pin,
    request_bytes,
)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def server(inbox: Inbox) -> Iterator[ControlServer]:
    """A server whose scheduler thread does not run, unless the test asks for `scheduler`."""
    with ControlServer(LOCAL, TOKEN, inbox) as served:
        yield served


@pytest.fixture
def scheduler(inbox: Inbox, worker: Worker) -> Iterator[None]:
    with SchedulerThread(inbox, worker):
        yield


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    with ControlClient(server.address, TOKEN, WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def refusing() -> Iterator[tuple[Address, Inbox]]:
    """Address and inbox of a server that takes no request of the tests that share it."""
    inbox = Inbox()
    with ControlServer(LOCAL, TOKEN, inbox) as served:
        yield served.address, inbox


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0", "unix"])
def test_commands_and_questions_go_through_on_every_kind_of_address(
    where: str, tmp_path: Path, inbox: Inbox, worker: Worker, scheduler: None
) -> None:
    address = Address.parse(f"unix:{tmp_path}/s" if where == "unix" else where)
    sent = (SetLabel("p1", 3, Label.IDLE), Demote("a/b ü", 4), Pin("p1", 5, 2.5), Release("p1", 6))
    with (
        ControlServer(address, TOKEN, inbox) as server,
        ControlClient(server.address, TOKEN) as client,
    ):
        assert client.send(*sent) == [Result(Status.DONE, tokens=epoch) for epoch in (3, 4, 5, 6)]
        assert client.residency() == [P1]
        assert client.residency("p1") == [P1]
        assert client.residency("a&b=ü c") == []
        assert client.levels() == LEVELS
        assert client.send() == []
    questions = [ResidencyQuestion(program) for program in (None, "p1", "a&b=ü c")]
    assert worker.seen == [Commands(list(sent)), *questions, LevelsQuestion()]


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer 0123456789abcdeX\r\n",
        f"Authorization: Bearer {TOKEN}0\r\n",
        f"Authorization: Bearer {TOKEN[:-1]}\r\n",
        f"Authorization: Basic {TOKEN}\r\n",
        f"Authorization: {TOKEN}\r\n",
        "Authorization: Bearer \xff\xfe\r\n",
        f"Authorization: Bearer wrong\r\n{AUTH}",
        f"{AUTH}Authorization: Bearer wrong\r\n",
    ],
)
@pytest.mark.parametrize("path", ["/v1/commands", "/nothing/here"])
def test_without_the_token_nothing_happens_and_nothing_is_learned(
    refusing: tuple[Address, Inbox], headers: str, path: str
) -> None:
    address, inbox = refusing
    request = request_bytes(pin("p", 1), path=path, headers=headers)
    status, answered, body = exchange(address, request)
    assert (status, answered["www-authenticate"]) == (401, "Bearer")
    assert error_line(body) == "the bearer token is missing or wrong"
    assert len(inbox) == 0


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_of_the_token_is_read_in_any_case(
    server: ControlServer, scheduler: None, scheme: str
) -> None:
    headers = f"authorization: {scheme} {TOKEN}\r\n"
    assert exchange(server.address, request_bytes(pin("p", 1), headers=headers))[0] == 200


def test_a_client_with_another_token_reads_the_refusal(server: ControlServer) -> None:
    with (
        ControlClient(server.address, "another-token-here") as client,
        pytest.raises(ControlError, match="token is missing or wrong") as raised,
    ):
        client.levels()
    assert raised.value.status == 401


def one(**fields: object) -> bytes:
    command = {"type": "pin", "program": "p", "epoch": 1} | fields
    return json.dumps({"commands": [command]}).encode()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"commands": x}', "JSON is malformed"),
        (b'{"commands":[{"type":"pin","program":"\xff","epoch":1}]}', "UTF-8"),
        (b"[" * 100_000, "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "missing required field `commands`"),
        (b'{"commands":[]}', "length >= 1 - at `$.commands`"),
        (b'{"commands":[{"program":"p","epoch":1}]}', "missing required field `type`"),
        (b'{"x\\n":1,"commands":[]}', "unknown field `x `"),
        (one(type="explode"), "'explode' - at `$.commands[0].type`"),
        (one(extra=1), "unknown field `extra` - at `$.commands[0]`"),
        (one(epoch=-1), "`$.commands[0].epoch`"),
        (one(epoch=1.5), "`$.commands[0].epoch`"),
        (one(epoch=2**63), "`$.commands[0].epoch`"),
        (one(program=""), "`$.commands[0].program`"),
        (one(program="x" * 257), "`$.commands[0].program`"),
        (one(type="set_label", label="hot"), "`$.commands[0].label`"),
        (json.dumps({"commands": [{"type": "unpin", "program": "p", "epoch": 1}] * 1025}).encode(),
         "length <= 1024 - at `$.commands`"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_in_one_line_that_names_the_field(
    refusing: tuple[Address, Inbox], body: bytes, line: str
) -> None:
    address, inbox = refusing
    status, _, answer = exchange(address, request_bytes(body))
    assert status == 400
    assert line in error_line(answer)
    assert len(inbox) == 0


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("?program=", "query parameter 'program': Expected `str` of length >= 1"),
        ("?program=" + "x" * 257, "length <= 256"),
        ("?program=a&program=b", "more than once"),
        ("?programme=a", "unknown query parameter 'programme'"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(
    refusing: tuple[Address, Inbox], query: str, line: str
) -> None:
    request = request_bytes(method="GET", path=f"/v1/residency{query}")
    status, _, body = exchange(refusing[0], request)
    assert status == 400
    assert line in error_line(body)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/commands/", 404),
        ("GET", "/v2/levels", 404),
        ("GET", "/v1/commands", 405),
        ("POST", "/v1/levels", 405),
        ("DELETE", "/v1/residency", 405),
    ],
)
def test_other_routes_and_methods_are_refused_as_json(
    refusing: tuple[Address, Inbox], method: str, path: str, status: int
) -> None:
    got, headers, body = exchange(refusing[0], request_bytes(method=method, path=path))
    assert got == status
    assert headers["content-type"] == "application/json"
    assert ("allow" in headers) == (status == 405)
    assert error_line(body)


def padded(size: int) -> bytes:
    body = pin("p", 1)
    return body + b" " * (size - len(body))


def chunked(body: bytes) -> bytes:
    head = f"POST /v1/commands HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{AUTH}"
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed


@pytest.mark.parametrize("encode", [request_bytes, chunked])
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 413)])
def test_a_body_may_have_one_mebibyte_and_no_byte_more(
    server: ControlServer, scheduler: None, worker: Worker, encode, extra: int, status: int
) -> None:
    got, _, body = exchange(server.address, encode(padded(MAX_BODY_BYTES + extra)))
    assert got == status, body
    assert worker.epochs("p") == ([] if extra else [1])


def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent(
    server: ControlServer,
) -> None:
    status, _, body = exchange(server.address, request_bytes(length=10**15))
    assert status == 413
    assert "1048576 bytes" in error_line(body)


def test_a_full_inbox_is_answered_with_503(pool: ThreadPoolExecutor, worker: Worker) -> None:
    inbox = Inbox(max_waiting=1)
    first = inbox.submit(LevelsQuestion())
    with ControlServer(LOCAL, TOKEN, inbox) as server:
        status, _, body = exchange(server.address, request_bytes(pin("p", 1)))
        assert status == 503
        assert "ask again later" in error_line(body)
        inbox.drain(worker.handle)
        assert first.result(0) == LEVELS
        with SchedulerThread(inbox, worker):
            assert exchange(server.address, request_bytes(pin("p", 2)))[0] == 200
    assert worker.epochs("p") == [2]


def test_a_request_that_the_scheduler_does_not_take_in_time_never_happens(
    inbox: Inbox, worker: Worker
) -> None:
    with (
        ControlServer(LOCAL, TOKEN, inbox, timeout_s=0.1) as server,
        ControlClient(server.address, TOKEN) as client,
    ):
        with pytest.raises(ControlError, match="it will not happen") as raised:
            client.send(Pin("late", 1))
        assert raised.value.status == 504
        assert inbox.drain(worker.handle) == 0
        with SchedulerThread(inbox, worker):
            client.send(Pin("next", 2))
    assert worker.epochs("late") == []
    assert worker.epochs("next") == [2]


def test_a_request_that_is_under_way_when_its_time_is_up_still_gets_its_answer(
    inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    never = threading.Event()

    def slow(_: Request) -> Reply:
        never.wait(1.0)
        return LEVELS

    with (
        ControlServer(LOCAL, TOKEN, inbox, timeout_s=0.5, receive_s=0.5) as server,
        ControlClient(server.address, TOKEN) as client,
    ):
        answer = pool.submit(client.levels)
        while not inbox.drain(slow):
            assert not answer.done()
        assert answer.result(WAIT_S) == LEVELS


def test_a_request_that_stays_under_way_is_answered_with_504_and_said_to_be_open(
    inbox: Inbox, pool: ThreadPoolExecutor, worker: Worker
) -> None:
    answered = threading.Event()

    def stuck(_: Request) -> Reply:
        assert answered.wait(WAIT_S)
        return LEVELS

    with (
        ControlServer(LOCAL, TOKEN, inbox, timeout_s=0.5) as server,
        ControlClient(server.address, TOKEN) as client,
    ):
        answer = pool.submit(client.levels)
        answer.add_done_callback(lambda _: answered.set())
        while not inbox.drain(stuck):
            assert not answer.done()
        with pytest.raises(ControlError, match="still at the request") as raised:
            answer.result(WAIT_S)
        assert raised.value.status == 504
        with SchedulerThread(inbox, worker):
            assert client.levels() == LEVELS


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("no DRAM tier here"), "no DRAM tier here"),
        (ZeroDivisionError("x\ny"), "failed in the scheduler: ZeroDivisionError: x y"),
    ],
)
def test_what_the_scheduler_raises_is_answered_with_500_and_the_next_request_is_served(
    client: ControlClient,
    inbox: Inbox,
    worker: Worker,
    pool: ThreadPoolExecutor,
    error: Exception,
    line: str,
) -> None:
    def broken(_: Request) -> Reply:
        raise error

    answer = pool.submit(client.levels)
    while not inbox.drain(broken):
        assert not answer.done()
    with pytest.raises(ControlError, match=line) as raised:
        answer.result(WAIT_S)
    assert raised.value.status == 500
    with SchedulerThread(inbox, worker):
        assert client.levels() == LEVELS
