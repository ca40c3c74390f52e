"""Builder for example tests: programs come, ask, finish; every request gets its own id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings

from kvtier.scheduling import Scheduler, build
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.scheduling.settings import ConcurSettings, SchedulerSettings
from kvtier.scheduling.state import Queue

PROPERTY = settings(derandomize=True, max_examples=200)
"""The same examples on every machine."""
C = TypeVar("C", bound=cmd.Command)
EXACT = SchedulerSettings(hbm_headroom=0.0)
"""HBM to the last token, so that examples can count."""


@dataclass
class Scene:
    scheduler: Scheduler
    now_s: float = 0.0
    num_asked: int = 0
    latest: dict[str, str] = field(default_factory=dict)
    """Each program's latest request."""

    def send(self, event: ev.Event) -> list[cmd.Command]:
        """Tell the scheduler; forwarded requests start at once."""
        out = self.scheduler.handle(event, self.now_s)
        self.scheduler.check_integrity()
        for command in only(out, cmd.Forward):
            self.send(ev.RequestForwarded(command.program, command.request))
        return out

    def at(self, now_s: float) -> Scene:
        self.now_s = now_s
        return self

    def worker(self, name: str, hbm_tokens: int, dram_tokens: int = 0) -> list[cmd.Command]:
        return self.send(ev.WorkerUp(name, hbm_tokens, dram_tokens))

    def arrive(self, program: str, group: str, shared_tokens: int) -> None:
        self.send(ev.ProgramArrived(program, None, group, shared_tokens))

    def ask(self, program: str, context_tokens: int) -> list[cmd.Command]:
        self.num_asked += 1
        self.latest[program] = f"{program}/{self.num_asked}"
        return self.send(ev.RequestArrived(program, self.latest[program], context_tokens))

    def produce(self, program: str, num_tokens: int) -> list[cmd.Command]:
        return self.send(ev.TokensProduced(program, self.latest[program], num_tokens))

    def finish(self, program: str, context_tokens: int | None = None) -> list[cmd.Command]:
        if context_tokens is None:
            context_tokens = self.scheduler.programs[program].tokens
        return self.send(ev.RequestFinished(program, self.latest[program], context_tokens))

    def cancel(self, program: str) -> list[cmd.Command]:
        return self.send(ev.RequestCancelled(program, self.latest[program]))

    def release(self, program: str) -> list[cmd.Command]:
        return self.send(ev.ProgramReleased(program))

    def tick(self) -> list[cmd.Command]:
        return self.send(ev.Tick())

    def stats(
        self, locked_tokens: int, prompt_tokens: int, cached_tokens: int, worker: str = "w"
    ) -> list[cmd.Command]:
        capacity = self.scheduler.workers[worker].hbm_tokens
        return self.send(
            ev.EngineStats(worker, locked_tokens, capacity, prompt_tokens, cached_tokens)
        )

    def step(self, program: str, tokens: int, start_s: float, end_s: float) -> None:
        """One whole inference, from `start_s` to `end_s`; it must not be held."""
        out = self.at(start_s).ask(program, tokens)
        assert not only(out, cmd.Hold), f"{program} is held: {out}"
        self.at(end_s).finish(program, tokens)

    def queue(self, program: str) -> Queue:
        return self.scheduler.programs[program].queue

    def queues(self) -> dict[str, str]:
        return {name: state.queue.value for name, state in self.scheduler.programs.items()}

    def running(self) -> set[str]:
        return {name for name, s in self.scheduler.programs.items() if s.running}

    def held(self) -> set[str]:
        return {name for name, s in self.scheduler.programs.items() if s.held}

    def marked(self) -> set[str]:
        return {name for name, s in self.scheduler.programs.items() if s.marked}


def scene(
    policy: str = "mori",
    admission: str = "none",
    *,
    hbm_tokens: int = 100,
    dram_tokens: int = 100,
    settings: SchedulerSettings = EXACT,
    concur: ConcurSettings | None = None,
) -> Scene:
    """A scheduler with one worker, `w`."""
    made = Scene(build(policy, admission, settings, concur))
    made.worker("w", hbm_tokens, dram_tokens)
    return made


def only(out: list[cmd.Command], kind: type[C]) -> list[C]:
    return [command for command in out if isinstance(command, kind)]


def forwarded(out: list[cmd.Command]) -> list[str]:
    """Programs whose requests were forwarded, in order."""
    return [command.program for command in only(out, cmd.Forward)]


def demoted(out: list[cmd.Command]) -> list[str]:
    return [command.program for command in only(out, cmd.Demote)]


def labels(out: list[cmd.Command]) -> dict[str, str]:
    return {command.program: command.label.value for command in only(out, cmd.SetLabel)}
