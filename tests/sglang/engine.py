"""A real server with kvtier in it beside a stock one, and what tests do to both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.ids import Label
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.client import ControlClient
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Demote,
    Levels,
    Promote,
    Residency,
    SetLabel,
    Status,
    TierLevel,
)

from ..sglang_cpu.ports import ReservedPort
from ..sglang_cpu.server import Generation, SglangServer
from ..sglang_cpu.tiny_model import VOCABULARY
from .channel import TOKEN

PAGE = 16
HBM = 4096
DRAM = 2 * HBM
CHUNK = 64
SLOTS = 4
CONTEXT = 960
"""Tokens of a program's context: four fit into HBM, eight into DRAM."""
KVTIER_ARGUMENTS = (
    *("--radix-cache-backend", "kvtier", "--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--page-size", str(PAGE), "--max-total-tokens", str(HBM)),
    *("--max-running-requests", str(SLOTS), "--chunked-prefill-size", str(CHUNK)),
)
# Asleep while nobody asks, so that it leaves the machine to the other server.
STOCK_ARGUMENTS = ("--max-total-tokens", "131072", "--page-size", str(PAGE), "--sleep-on-idle")
SYSTEM = 256
"""Tokens of the system prompt that all conversations share."""
_TASK = 64
_TOOL = 200
_ANSWER = 24
# Ways in which a request says whose it is.
IDENTITY = {"program": "named", "label": "idle", "epoch": 4}
CUSTOM = {"custom_params": {"kvtier": IDENTITY}}
HINT = {"action_id": "a", "action_type": "kvtier", "action_version": "1", "payload": IDENTITY}
HINTS = {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [HINT]}}
KEY = {"x-smg-routing-key": "named"}
WAIT_S = 30.0
_POLL_S = 0.005
_Ask = Callable[[int, list[int], int], Generation]
"""Turn, prompt and number of new tokens in."""


def tokens(name: str, count: int) -> list[int]:
    """The first `count` of a sequence that belongs to the name and begins as no other does."""
    rng = random.Random(name)
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def until(happened: Callable[[], object], what: str) -> None:
    """Return once `happened` holds; AssertionError where it does not in good time."""
    end = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end, f"not in {WAIT_S:g} s: {what}"
        time.sleep(_POLL_S)


def is_quiet(tier: TierLevel) -> bool:
    """Whether nothing holds or copies a page of it, and all pages are accounted for."""
    idle = tier.protected == tier.in_flight == 0
    return idle and tier.free + tier.evictable == tier.capacity


def check_sum(levels: Levels) -> None:
    """Raises AssertionError unless the parts of each tier are its capacity."""
    for tier in (levels.hbm, levels.dram):
        parts = (tier.free, tier.evictable, tier.protected, tier.in_flight)
        assert min(parts) >= 0, levels
        assert sum(parts) == tier.capacity, levels


@dataclass(frozen=True)
class Place:
    """Tokens that only the program holds, in each tier."""

    hbm: int
    dram: int


class Engine:
    """The server with kvtier, its control channel, and a stock server with room for all."""

    def __init__(self, server: SglangServer, stock: SglangServer, control: ControlClient) -> None:
        self.server = server
        self.stock = stock
        self.control = control

    def clear(self) -> None:
        """End all requests and empty the cache. Labels and epochs stay."""
        everything = {"rid": "", "abort_all": True}
        self.server.http.post("/abort_request", json=everything).raise_for_status()
        self.settle()
        self.server.flush()

    def ask(
        self,
        program: str,
        prompt: Sequence[int],
        count: int = 1,
        *,
        label: Label | None = None,
        epoch: int | None = None,
        **fields: Any,
    ) -> Generation:
        """A request of the program with `count` new tokens."""
        params = {"kvtier": identity(program, label, epoch)}
        return self.server.generate(prompt, count, custom_params=params, **fields)

    def reference(self, prompt: Sequence[int], count: int = 1) -> tuple[int, ...]:
        """What a stock server with room for all answers."""
        return self.stock.generate(prompt, count).output_ids

    def bring(
        self, program: str, label: Label = Label.BUSY, *, size: int = CONTEXT, epoch: int = 0
    ) -> None:
        """Let the program compute a context of `size` tokens, whole pages, that none other has."""
        self.ask(program, tokens(program, size), label=label, epoch=epoch)

    def converse(self, name: str, turns: int) -> list[Generation]:
        """An agent's answers: each turn's prompt holds all earlier ones and what a tool says.

        While its tools run it is IDLE.
        """

        def ask(turn: int, prompt: list[int], count: int) -> Generation:
            answer = self.ask(name, prompt, count, label=Label.BUSY, epoch=2 * turn)
            self.obey(SetLabel(name, 2 * turn + 1, Label.IDLE))
            return answer

        return _converse(ask, name, turns)

    def converse_with_stock(self, name: str, turns: int) -> list[Generation]:
        """The same with the stock server."""
        return _converse(lambda _, *asked: self.stock.generate(*asked), name, turns)

    def run_and_move(self, name: str) -> None:
        """A program grows, and is demoted and promoted in between; some of that is refused."""
        for epoch in range(6):
            self.ask(name, tokens(name, CONTEXT + epoch * 32), 16, label=Label.BUSY, epoch=epoch)
            self.control.send(SetLabel(name, epoch, Label.IDLE), Demote(name, epoch))
            if epoch % 2:
                self.control.send(Promote(name, epoch))

    def residency(self, program: str) -> Residency:
        """The program's; the worker must know it."""
        (residency,) = self.control.residency(program)
        return residency

    def place(self, program: str) -> Place:
        residency = self.residency(program)
        return Place(residency.hbm_private, residency.dram_private)

    def obey(self, *commands: AnyCommand) -> list[Status]:
        """Send the commands, none of which may be refused."""
        results = self.control.send(*commands)
        assert Status.REFUSED not in [result.status for result in results], results
        return [result.status for result in results]

    def demote(self, program: str, epoch: int = 0) -> None:
        """Demote the program and wait until its pages are in DRAM alone."""
        self.obey(Demote(program, epoch))
        until(lambda: self.place(program).hbm == 0, f"{program} has left HBM")

    def promote(self, program: str, epoch: int = 0) -> None:
        """Promote a program that is in DRAM alone, once nothing runs, and wait until it is done."""
        self.settle()
        self.obey(Promote(program, epoch))
        until(lambda: self.place(program).hbm > 0, f"{program} is in HBM")

    def settle(self) -> Levels:
        """The levels once no request and no copy holds a page."""
        levels = self.control.levels()

        def is_settled() -> bool:
            nonlocal levels
            levels = self.control.levels()
            check_sum(levels)
            return is_quiet(levels.hbm) and is_quiet(levels.dram)

        until(is_settled, f"levels are back: {levels}")
        return levels

    def waiting(self) -> int:
        """Requests in SGLang's queue."""
        answer = self.server.http.get("/v1/loads").raise_for_status().json()
        return sum(load["num_waiting_reqs"] for load in answer["loads"])


@contextmanager
def running_engine(model: Path, folder: Path) -> Iterator[Engine]:
    """Both servers, ready, with their logs in the folder."""
    with ExitStack() as stack:
        address = Address.parse(f"127.0.0.1:{stack.enter_context(ReservedPort()).number}")
        server = SglangServer(
            model,
            folder,
            arguments=KVTIER_ARGUMENTS,
            environment={"KVTIER_CONTROL": str(address), "KVTIER_CONTROL_TOKEN": TOKEN},
        )
        stock = SglangServer(model, folder, arguments=STOCK_ARGUMENTS, stop_s=0)
        for one in (server, stock):
            one.start()
            stack.push(one)
        for one in (server, stock):
            one.wait_until_ready()
        yield Engine(server, stock, stack.enter_context(ControlClient(address, TOKEN)))


def identity(
    program: str, label: Label | None = None, epoch: int | None = None
) -> dict[str, object]:
    """What `custom_params.kvtier` of a request says."""
    named = {"program": program, "label": label, "epoch": epoch}
    return {name: value for name, value in named.items() if value is not None}


def _converse(ask: _Ask, name: str, turns: int) -> list[Generation]:
    prompt = tokens("system", SYSTEM) + tokens(name, _TASK)
    answers = []
    for turn in range(turns):
        answers.append(ask(turn, prompt, _ANSWER))
        prompt = [*prompt, *answers[-1].output_ids, *tokens(f"{name}, tool {turn}", _TOOL)]
    return answers


def in_parallel(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of the jobs, each in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
