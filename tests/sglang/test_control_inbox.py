"""Addresses and tokens, and the queue between clients and the scheduler thread."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address, check_token
from kvtier.integration.sglang.control.errors import ChannelBusy, ChannelClosed
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import (
    Commands,
    LevelsQuestion,
    Pin,
    Reply,
    Request,
)

from .channel import LEVELS, TOKEN, WAIT_S, Worker


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:31000", Address(host="127.0.0.1", port=31000)),
        ("127.1.2.3:0", Address(host="127.1.2.3", port=0)),
        ("[::1]:65535", Address(host="::1", port=65535)),
        ("unix:/run/kvtier.sock", Address(path="/run/kvtier.sock")),
    ],
)
def test_an_address_reads_as_it_is_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


def test_localhost_is_the_ipv4_loopback_whatever_a_name_server_says() -> None:
    assert Address.parse("localhost:0") == Address(host="127.0.0.1", port=0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0.0.0.0:31000", "only loopback"),
        ("[::]:31000", "only loopback"),
        ("192.168.1.2:31000", "put a proxy with TLS in front"),
        ("worker.example:31000", "only loopback"),
        ("127.0.0.1", "is none of"),
        ("127.0.0.1:", "is none of"),
        ("127.0.0.1:-1", "is none of"),
        ("127.0.0.1:65536", "above 65535"),
        ("::1:31000", "is none of"),
        ("127.0.0.1:31000\n", "is none of"),
        ("", "is none of"),
        ("unix:", "absolute path"),
        ("unix:relative.sock", "absolute path"),
        ("unix:/nul\0.sock", "absolute path"),
        ("unix:/" + "x" * 107, "longer than 107 bytes"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line_that_shows_it(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Address.parse(text)
    assert line in str(raised.value)
    assert repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "token", ["", "0123456789abcde", "with blank 0123456", "ünicode-0123456789"]
)
def test_a_weak_or_unsendable_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_token(token)
    assert not token or token not in str(raised.value)


def test_a_token_of_sixteen_characters_will_do() -> None:
    assert check_token(TOKEN) == TOKEN


def commands(epoch: int) -> Commands:
    return Commands([Pin("p", epoch)])


def test_requests_are_answered_in_the_order_of_their_arrival() -> None:
    inbox, worker = Inbox(), Worker()
    futures = [inbox.submit(commands(epoch)) for epoch in range(5)]
    assert inbox.drain(worker.handle) == 5
    assert worker.epochs("p") == list(range(5))
    assert [future.result(0).results[0].tokens for future in futures] == list(range(5))


def test_a_drain_takes_no_more_than_its_limit_and_leaves_the_rest() -> None:
    inbox, worker = Inbox(), Worker()
    for epoch in range(100):
        inbox.submit(commands(epoch))
    assert [inbox.drain(worker.handle) for _ in range(3)] == [64, 36, 0]
    assert inbox.drain(worker.handle, limit=0) == 0


def test_a_drain_leaves_what_arrives_while_it_runs() -> None:
    inbox = Inbox()

    def handle(request: Request) -> Reply:
        inbox.submit(request)
        return LEVELS

    inbox.submit(LevelsQuestion())
    assert inbox.drain(handle) == 1
    assert inbox.drain(handle) == 1


def test_a_cancelled_request_is_never_handed_over_and_takes_no_turn() -> None:
    inbox, worker = Inbox(), Worker()
    futures = [inbox.submit(commands(epoch)) for epoch in range(4)]
    assert futures[0].cancel()
    assert futures[2].cancel()
    assert inbox.drain(worker.handle, limit=2) == 2
    assert worker.epochs("p") == [1, 3]
    with pytest.raises(CancelledError):
        futures[0].result(0)


def test_a_request_that_was_taken_cannot_be_cancelled() -> None:
    inbox = Inbox()
    cancelled: list[bool] = []

    def handle(_: Request) -> Reply:
        cancelled.append(future.cancel())
        return LEVELS

    future = inbox.submit(LevelsQuestion())
    inbox.drain(handle)
    assert cancelled == [False]
    assert future.result(0) == LEVELS


def test_what_the_handler_raises_is_the_answer_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, worker = Inbox(), Worker()

    def handle(request: Request) -> Reply:
        if isinstance(request, LevelsQuestion):
            raise RuntimeError("pool is gone")
        return worker.handle(request)

    broken, whole = inbox.submit(LevelsQuestion()), inbox.submit(commands(7))
    with caplog.at_level(logging.ERROR):
        assert inbox.drain(handle) == 2
    with pytest.raises(RuntimeError, match="pool is gone"):
        broken.result(0)
    assert whole.result(0).results[0].tokens == 7
    assert "LevelsQuestion failed" in caplog.text
    assert "pool is gone" in caplog.text


def test_an_interrupt_in_the_handler_ends_the_scheduler_and_leaves_no_request_unanswered() -> None:
    inbox = Inbox()

    def handle(_: Request) -> Reply:
        raise KeyboardInterrupt

    future = inbox.submit(LevelsQuestion())
    with pytest.raises(KeyboardInterrupt):
        inbox.drain(handle)
    assert isinstance(future.exception(0), KeyboardInterrupt)


def test_a_full_inbox_refuses_and_takes_again_once_drained() -> None:
    inbox, worker = Inbox(max_waiting=2), Worker()
    inbox.submit(commands(0))
    inbox.submit(commands(1))
    with pytest.raises(ChannelBusy, match="2 requests wait"):
        inbox.submit(commands(2))
    inbox.drain(worker.handle)
    inbox.submit(commands(3))
    inbox.drain(worker.handle)
    assert worker.epochs("p") == [0, 1, 3]


def test_closing_fails_what_waits_and_what_comes_later() -> None:
    inbox, worker = Inbox(), Worker()
    waiting, cancelled = inbox.submit(commands(0)), inbox.submit(commands(1))
    cancelled.cancel()
    inbox.close()
    inbox.close()
    assert isinstance(waiting.exception(0), ChannelClosed)
    assert cancelled.cancelled()
    with pytest.raises(ChannelClosed):
        inbox.submit(commands(2))
    assert inbox.drain(worker.handle) == 0
    assert worker.seen == []


def test_every_request_of_many_threads_is_answered_once_while_closing_and_cancelling() -> None:
    inbox, worker = Inbox(max_waiting=100_000), Worker()
    futures: list[list[Future[Reply]]] = [[] for _ in range(4)]
    started = threading.Barrier(6)

    def submit(number: int) -> None:
        started.wait(WAIT_S)
        try:
            for epoch in range(2000):
                future = inbox.submit(Commands([Pin(f"p{number}", epoch)]))
                futures[number].append(future)
                if epoch % 3 == 0:
                    future.cancel()
        except ChannelClosed:
            pass

    def close() -> None:
        started.wait(WAIT_S)
        futures_seen.wait(WAIT_S)
        inbox.close()

    futures_seen = threading.Event()
    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=close))
    for thread in threads:
        thread.start()
    started.wait(WAIT_S)
    while any(thread.is_alive() for thread in threads):
        if inbox.drain(worker.handle):
            futures_seen.set()
    inbox.drain(worker.handle)
    for number, mine in enumerate(futures):
        assert all(future.done() for future in mine)
        answered = [
            epoch
            for epoch, future in enumerate(mine)
            if not future.cancelled() and future.exception(0) is None
        ]
        assert worker.epochs(f"p{number}") == answered
        lost = [f for f in mine if not f.cancelled() and f.exception(0) is not None]
        assert all(isinstance(future.exception(0), ChannelClosed) for future in lost)


def test_a_drain_does_not_wait_for_a_sender_that_is_stopped_in_the_middle() -> None:
    inbox, worker = Inbox(), Worker()
    future = inbox.submit(LevelsQuestion())
    with inbox._lock:  # as a sender holds it that the system does not run now
        drainer = threading.Thread(target=inbox.drain, args=(worker.handle,))
        drainer.start()
        assert future.result(WAIT_S) == LEVELS
        drainer.join(WAIT_S)
        assert not drainer.is_alive()
