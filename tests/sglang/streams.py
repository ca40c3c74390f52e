"""Requests that end early, in every phase that one goes through, and clients that die."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from kvtier.integration.sglang.control.address import Address

from .engine import CONTEXT, HBM, PAGE, SLOTS, WAIT_S, Engine, tokens, until

LONG = 600
"""New tokens of a request that is to end early: seconds of work."""


class Ending(NamedTuple):
    """How a stream ended, and after how many tokens."""

    reason: str
    count: int


class Stream:
    """A request of a program on a connection of its own, which can hang up at any moment."""

    def __init__(
        self, engine: Engine, rid: str, program: str, prompt: Sequence[int], count: int = LONG
    ) -> None:
        self.rid = rid
        self._engine = engine
        self._received = b""
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": count,
            "ignore_eos": True,
            "custom_params": {"kvtier": {"program": program}},
        }
        body = {"input_ids": list(prompt), "rid": rid, "stream": True, "sampling_params": sampling}
        data = json.dumps(body).encode()
        head = (
            "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        target = urlsplit(engine.server.url)
        self._socket = socket.create_connection((target.hostname, target.port), WAIT_S)
        self._socket.sendall(head.encode() + data)

    def wait_for_token(self) -> None:
        """Return when the first token has come."""
        while b"data: {" not in self._received:
            self._receive()

    def hang_up(self) -> None:
        """Close the connection without a word."""
        self._socket.close()

    def abort(self) -> Ending:
        """Abort by the server's own route, and wait for the end of the stream."""
        with self._socket:
            while b"\r\n\r\n" not in self._received:  # it must not overtake the request
                self._receive()
            self._engine.server.abort(self.rid)
            while b"[DONE]" not in self._received:
                self._receive()
        answers = [line for line in self._received.splitlines() if line.startswith(b"data: {")]
        last = json.loads(answers[-1].removeprefix(b"data: "))
        return Ending(last["meta_info"]["finish_reason"]["type"], len(last.get("output_ids") or []))

    def _receive(self) -> None:
        chunk = self._socket.recv(65536)
        assert chunk, f"the server ended the stream: {self._received[-500:]!r}"
        self._received += chunk


Phase = Callable[[Engine, str, ExitStack], Stream]
"""Starts a request of the program, whose context is in HBM, and returns in the phase.

What holds the request there is ended with the stack.
"""


def waiting_for_a_slot(engine: Engine, program: str, stack: ExitStack) -> Stream:
    for index in range(SLOTS):
        _hold(engine, f"slot {index}", PAGE, stack)
    stream = _request(engine, program, 64)
    until(lambda: engine.waiting() == 1, "it waits")
    assert engine.residency(program).running == 0  # SGLang has not even looked it up
    return stream


def waiting_for_memory(engine: Engine, program: str, stack: ExitStack) -> Stream:
    engine.demote(program)
    stack.callback(engine.promote, program)
    # Whatever it decodes, less than the program's context is free.
    _hold(engine, "memory", HBM - CONTEXT + 4 * PAGE, stack, count=CONTEXT - 8 * PAGE)
    stream = _request(engine, program, 64)
    until(lambda: engine.waiting() == 1, "it waits")
    assert engine.place(program).hbm == 0
    return stream


def loading(engine: Engine, program: str, stack: ExitStack) -> Stream:
    engine.demote(program)
    stream = _request(engine, program, 1024)
    until(lambda: engine.place(program).hbm > 0, "its load has begun")
    return stream


def prefill(engine: Engine, program: str, stack: ExitStack) -> Stream:
    stream = _request(engine, program, 2048)
    until(lambda: engine.place(program).hbm > CONTEXT, "its first chunk is there")
    return stream


def decode(engine: Engine, program: str, stack: ExitStack) -> Stream:
    stream = _request(engine, program, 64)
    stream.wait_for_token()
    return stream


PHASES = (
    *(waiting_for_a_slot, loading, prefill, decode),
    # On a busy machine SGLang's load report may not show in time that anyone waits.
    pytest.param(waiting_for_memory, marks=pytest.mark.long),
)


@contextmanager
def stream_in(phase: Phase, engine: Engine, program: str) -> Iterator[Stream]:
    """A stream of the program that is in the phase, until it is ended."""
    with ExitStack() as stack:
        yield phase(engine, program, stack)
        until(
            lambda: engine.waiting() == engine.residency(program).running == 0, f"{program} ended"
        )


def _request(engine: Engine, program: str, tail: int) -> Stream:
    prompt = [*tokens(program, CONTEXT), *tokens(f"{program}, tail", tail)]
    return Stream(engine, f"{program}.", program, prompt)


def _hold(engine: Engine, program: str, size: int, stack: ExitStack, count: int = LONG) -> None:
    """Another program decodes until the stack ends, and not less."""
    stream = Stream(engine, f"{program}.", program, tokens(program, size), count)
    stream.wait_for_token()

    def end() -> None:
        ending = stream.abort()
        assert ending.reason == "abort", f"{program} ended before the request that it held"

    stack.callback(end)


def end_at_random(engine: Engine, program: str, rounds: int) -> list[Ending]:
    """Endings of those requests that were aborted; others hung up."""
    rng = random.Random(program)
    endings = []
    for number in range(rounds):
        tail = tokens(f"{program}, tail {number}", rng.choice((1, 64, 512)))
        prompt = [*tokens(program, CONTEXT // 2), *tail]
        stream = Stream(engine, f"{program}, {number}.", program, prompt)
        time.sleep(rng.choice((0, 0.02, 0.3)) * rng.random())  # any moment
        if rng.random() < 0.5:
            endings.append(stream.abort())
        else:
            stream.hang_up()
    return endings


def killed_in_the_middle(address: Address, request: bytes) -> None:
    """A process that has sent a part of a request is killed."""
    program = (
        "import socket, sys\n"
        f"sock = socket.create_connection(({address.host!r}, {address.port}))\n"
        f"sock.sendall({request!r})\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"sent\n"
        client.kill()
