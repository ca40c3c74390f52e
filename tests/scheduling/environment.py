"""A small world around a scheduler: it carries out commands, keeps its own books, checks the laws.

The books are kept from events and commands alone. After every event the laws of `laws.py` compare
them with the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import msgspec

from kvtier.scheduling import POLICIES, ConcurSettings, Scheduler, SchedulerSettings, build
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev

from .laws import check_after_event, check_after_tick, check_command

SETTINGS = SchedulerSettings(max_hold_s=60.0, idle_expiry_s=100.0)
CONCUR = ConcurSettings(initial_window=4.0)
NUM_PROGRAMS = 9
GROUPS = (None, "g0", "g1")
T = TypeVar("T")


class Stage(StrEnum):
    ASKED = "asked"
    HELD = "held"
    RUNNING = "running"


@dataclass(slots=True)
class Request:
    request: str
    program: str
    context_tokens: int
    stage: Stage = Stage.ASKED
    worker: str | None = None
    lost: bool = False
    """Its worker went down under it."""


@dataclass(slots=True)
class Program:
    tokens: int = 0
    group: str | None = None
    shared_tokens: int = 0
    route: str | None = None
    label: cmd.Label | None = None
    label_worker: str | None = None
    copy_on: str | None = None
    """The worker whose DRAM holds its KV, between Demote and Promote."""
    came_up: bool = False
    epoch: int = 0
    epoch_step: int = -1
    released: bool = False
    resized: bool = False
    """Its size, or its head, has changed since it was demoted."""

    @property
    def head_tokens(self) -> int:
        return min(self.shared_tokens, self.tokens) if self.group is not None else 0


@dataclass
class Environment:
    policy: str
    admission: str
    capacities: dict[str, tuple[int, int]]
    now_s: float = 0.0
    log: list[tuple[float, ev.Event]] = field(default_factory=list)
    answers: list[list[cmd.Command]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    requests: dict[str, Request] = field(default_factory=dict)
    """Those that have not ended."""
    programs: dict[str, Program] = field(default_factory=dict)
    counters: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = self.fresh()
        self.tiered = POLICIES[self.policy].labels
        for worker in self.capacities:
            self.worker_up(worker)

    def fresh(self) -> Scheduler:
        return build(self.policy, self.admission, SETTINGS, CONCUR)

    # Events and commands -------------------------------------------------------------------

    def send(self, event: ev.Event) -> list[cmd.Command]:
        self.log.append((self.now_s, event))
        out = self.scheduler.handle(event, self.now_s)
        self.answers.append(out)
        self.counts[type(event).__name__] += 1
        self._book_event(event, out)
        for command in out:
            self._carry_out(command)
        self._forget_gone()
        check_after_event(self)
        if isinstance(event, ev.Tick):
            check_after_tick(self)
        for command in out:
            if isinstance(command, cmd.Forward):
                self.send(ev.RequestForwarded(command.program, command.request))
        return out

    def _book_event(self, event: ev.Event, out: list[cmd.Command]) -> None:
        match event:
            case ev.RequestArrived(program=name, request=request, context_tokens=tokens):
                self.requests[request] = Request(request, name, tokens)
                program = self.programs.setdefault(name, Program())
                refused = any(isinstance(c, cmd.Reject) and c.request == request for c in out)
                if not refused:
                    program.tokens, program.released, program.resized = tokens, False, True
            case ev.TokensProduced(program=name, num_tokens=tokens):
                self.programs[name].tokens += tokens
            case ev.RequestFinished(program=name, request=request, context_tokens=tokens):
                self.programs[name].tokens = tokens
                del self.requests[request]
            case ev.RequestCancelled(request=request):
                del self.requests[request]
            case ev.ProgramArrived(program=name, shared_group=group, shared_tokens=tokens):
                program = self.programs.setdefault(name, Program())
                program.group, program.shared_tokens, program.resized = group, tokens, True
            case ev.ProgramReleased(program=name):
                self.programs[name].released = True
            case ev.WorkerDown(worker=worker):
                self._book_loss(worker)

    def _book_loss(self, worker: str) -> None:
        for program in self.programs.values():
            if program.label_worker == worker:
                program.label = program.label_worker = program.copy_on = None
        for request in self.running():
            request.lost |= request.worker == worker

    def _carry_out(self, command: cmd.Command) -> None:
        check_command(self, command)
        program = self.programs[command.program]
        self.counts[type(command).__name__] += 1
        match command:
            case cmd.Forward(request=request, worker=worker):
                self.requests[request].stage = Stage.RUNNING
                self.requests[request].worker = worker
            case cmd.Hold(request=request):
                self.requests[request].stage = Stage.HELD
            case cmd.Reject(request=request):
                del self.requests[request]
            case cmd.Route(worker=worker):
                program.route = worker
            case cmd.SetLabel(worker=worker, label=label):
                program.came_up = label is cmd.Label.BUSY and program.copy_on is not None
                program.label, program.label_worker = label, worker
                if label is not cmd.Label.IDLE:
                    program.copy_on = None
            case cmd.Demote(worker=worker):
                program.copy_on, program.resized = worker, False
            case cmd.Drop(worker=worker):
                if program.label_worker == worker:
                    program.label = program.label_worker = program.copy_on = None
        if isinstance(command, cmd.Demote | cmd.Promote | cmd.Drop | cmd.SetLabel):
            program.epoch, program.epoch_step = command.epoch, len(self.log)

    def _forget_gone(self) -> None:
        busy = {request.program for request in self.requests.values()}
        for name in [n for n in self.programs if n not in self.scheduler.programs]:
            if name not in busy:
                del self.programs[name]

    # What there is -------------------------------------------------------------------------

    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.stage is Stage.RUNNING]

    def held(self) -> list[Request]:
        return [r for r in self.requests.values() if r.stage is Stage.HELD]

    def healthy(self) -> list[Request]:
        return [r for r in self.running() if not r.lost]

    def down(self) -> list[str]:
        return [name for name in self.capacities if name not in self.scheduler.workers]

    # Operations; an index chooses among what there is, and nothing happens when there is none ---

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def tick(self) -> None:
        self.send(ev.Tick())

    def worker_up(self, worker: str) -> None:
        hbm, dram = self.capacities[worker]
        self.counters[worker] = [0, 0]
        self.send(ev.WorkerUp(worker, hbm, dram))

    def worker_returns(self, index: int) -> None:
        for worker in pick(self.down(), index):
            self.worker_up(worker)

    def worker_goes(self, index: int) -> None:
        for worker in pick(list(self.scheduler.workers), index):
            self.send(ev.WorkerDown(worker))

    def arrive(self, index: int, group: int, shared_tokens: int) -> None:
        name = f"p{index % NUM_PROGRAMS}"
        shared = GROUPS[group % len(GROUPS)]
        self.send(ev.ProgramArrived(name, None, shared, shared_tokens if shared else 0))

    def ask(self, index: int, context_tokens: int) -> None:
        request = f"r{self.counts['RequestArrived']}"
        self.send(ev.RequestArrived(f"p{index % NUM_PROGRAMS}", request, context_tokens))

    def produce(self, index: int, num_tokens: int) -> None:
        for r in pick(self.healthy(), index):
            self.send(ev.TokensProduced(r.program, r.request, num_tokens))

    def finish(self, index: int, num_tokens: int = 0) -> None:
        for r in pick(self.healthy(), index):
            tokens = self.programs[r.program].tokens + num_tokens
            self.send(ev.RequestFinished(r.program, r.request, tokens))
            if r.program in self.scheduler.programs:
                self.send(ev.ToolCalled(r.program, "bash"))

    def cancel_held(self, index: int) -> None:
        for r in pick(self.held(), index):
            self.send(ev.RequestCancelled(r.program, r.request))

    def cancel_running(self, index: int) -> None:
        lost = [r for r in self.running() if r.lost]
        for r in pick(lost or self.running(), index):
            self.send(ev.RequestCancelled(r.program, r.request))

    def release(self, index: int) -> None:
        for name in pick(list(self.programs), index):
            self.send(ev.ProgramReleased(name))

    def report(self, index: int, age: int, kept_percent: int) -> None:
        for name in pick(list(self.programs), index):
            program = self.programs[name]
            kept = (program.tokens - program.head_tokens) * kept_percent // 100
            self.counts["stale report" if age else "current report"] += 1
            program.resized |= not age
            self.send(ev.Residency(name, program.epoch - age, 0, kept))

    def copy_done(self, index: int, age: int) -> None:
        for name, program, way in self._copies(index):
            self.send(ev.TransferFinished(name, program.epoch - age, way, program.tokens))

    def copy_failed(self, index: int, age: int) -> None:
        for name, program, way in self._copies(index):
            self.send(ev.TransferFailed(name, program.epoch - age, way))

    def refuse(self, index: int, age: int) -> None:
        for name, program, _ in self._copies(index):
            self.send(ev.CommandRefused(name, program.epoch - age, "no room"))

    def _copies(self, index: int) -> list[tuple[str, Program, ev.Direction]]:
        """One program, and the way its last copy went; those with a copy in DRAM first."""
        names = [n for n, p in self.programs.items() if p.copy_on] or list(self.programs)
        down, up = ev.Direction.D2H, ev.Direction.H2D
        return [
            (name, self.programs[name], down if self.programs[name].copy_on else up)
            for name in pick(names, index)
        ]

    def stats(self, index: int, locked_percent: int, cached_percent: int, num_tokens: int) -> None:
        for worker in pick(list(self.scheduler.workers), index):
            self.counters[worker][0] += num_tokens
            self.counters[worker][1] += num_tokens * cached_percent // 100
            locked = self.capacities[worker][0] * locked_percent // 100
            self.send(
                ev.EngineStats(worker, locked, self.capacities[worker][0], *self.counters[worker])
            )

    # The end -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything ends: every held request must get its turn, and nothing may be left."""
        while self.down():
            self.worker_returns(0)
        for r in [r for r in self.running() if r.lost]:
            self.send(ev.RequestCancelled(r.program, r.request))
        while self.requests:
            num_open = len(self.requests)
            self._release_idle()
            while self.healthy():
                self.finish(0)
            self._release_idle()
            self.now_s = max(self.now_s, max(time_s for time_s, _ in self.log)) + 5.0
            self.tick()
            assert self.running() or len(self.requests) < num_open, (
                f"nothing runs, yet these wait for ever: {self.held()}"
            )
        self._release_idle()
        assert not self.scheduler.programs, f"left over: {list(self.scheduler.programs)}"
        for worker in self.scheduler.workers.values():
            sums = (worker.staying.tokens, worker.leaving.tokens, worker.cpu.tokens)
            assert sums == (0, 0, 0), f"{worker.worker} still counts {sums} tokens"
            assert worker.num_running_requests == 0
        self.check_replay()

    def _release_idle(self) -> None:
        busy = {r.program for r in self.requests.values()}
        for name in [n for n in self.programs if n not in busy]:
            self.send(ev.ProgramReleased(name))

    def check_replay(self) -> None:
        """Decisions are a function of events and time: the same list gives the same bytes."""
        again = self.fresh()
        answers = [again.handle(event, now_s) for now_s, event in self.log]
        assert encode(answers) == encode(self.answers), "a replay decided otherwise"


def encode(answers: list[list[cmd.Command]]) -> bytes:
    return msgspec.json.encode([[(type(c).__name__, c) for c in answer] for answer in answers])


def pick(items: list[T], index: int) -> list[T]:
    """The item at `index`, counted round and round; empty when there is none."""
    return [items[index % len(items)]] if items else []
