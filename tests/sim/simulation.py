"""A simulation that is watched: every event, and every tick, checked from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.scheduling.state import ProgramState, Queue
from kvtier.sim import SimSettings
from kvtier.sim.driver import Simulation
from kvtier.sim.workload import plan_programs
from kvtier.traces import Trace


class Watched:
    """Runs `settings` over `trace` and keeps what the scheduler was told and asked for."""

    def __init__(
        self,
        trace: Trace,
        settings: SimSettings,
        on_tick: Sequence[Callable[[Watched, float], None]] = (),
    ) -> None:
        plans = plan_programs(trace, settings.model.max_context, settings.gaps, settings.gap_cap_s)
        self.settings = settings
        self.simulation = Simulation(settings, plans, self._tick)
        self.scheduler = self.simulation.scheduler
        self.recorder = self.simulation.recorder
        self.events: list[tuple[float, ev.Event]] = []
        self.commands: list[tuple[float, cmd.Command]] = []
        self.num_ticks = 0
        self.num_asked = 0
        self.endings: Counter[str] = Counter()
        """How often each request has ended."""
        self._on_tick = on_tick
        self._handle = self.scheduler.handle
        self.scheduler.handle = self._record  # type: ignore[method-assign]

    def run(self) -> Watched:
        self.simulation.run()
        return self

    def _record(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        self.events.append((now_s, event))
        self.num_asked += isinstance(event, ev.RequestArrived)
        if isinstance(event, ev.RequestFinished):
            self.endings[event.request] += 1
        commands = self._handle(event, now_s)
        self.commands += [(now_s, command) for command in commands]
        self.endings.update(c.request for c in commands if isinstance(c, cmd.Reject))
        return commands

    def _tick(self, now_s: float, num_ended: int) -> None:
        assert num_ended == self.recorder.programs_ended
        self.num_ticks += 1
        for check in self._on_tick:
            check(self, now_s)

    def told(self, kind: type[ev.Event]) -> list[tuple[float, ev.Event]]:
        return [(t, e) for t, e in self.events if isinstance(e, kind)]


def tokens_of(programs: list[ProgramState], *, kept: bool) -> int:
    """Private tokens, plus the largest head per group: what a queue is charged."""
    heads: dict[str, int] = {}
    for state in programs:
        if state.shared_group is not None:
            largest = max(heads.get(state.shared_group, 0), state.head_tokens)
            heads[state.shared_group] = largest
    private = sum(s.kept_tokens if kept else s.private_tokens for s in programs)
    return private + sum(heads.values())


def check_queues_fit(watched: Watched, now_s: float) -> None:
    """Law 9 at a tick: what stays fits HBM, the CPU queue fits DRAM; laws 5 and 8 besides."""
    del now_s
    states = list(watched.scheduler.programs.values())
    for name, worker in watched.scheduler.workers.items():
        mine = [s for s in states if s.worker == name]
        staying = [s for s in mine if s.queue is Queue.GPU and not s.marked]
        assert tokens_of(staying, kept=False) <= worker.hbm_tokens
        kept = tokens_of([s for s in mine if s.queue is Queue.CPU], kept=True)
        assert kept <= worker.dram_tokens
    watched.scheduler.check_integrity()
    for engine in watched.simulation.engines.values():
        engine.check_integrity()


def check_only_the_gpu_queue_runs(watched: Watched, now_s: float) -> None:
    """Law 9: no request is in an engine for a program outside its worker's GPU queue."""
    del now_s
    for state in watched.scheduler.programs.values():
        assert not state.running or state.queue is Queue.GPU, state.program


def check_all_requests_are_somewhere(watched: Watched, now_s: float) -> None:
    """Law 5: asked = ended + held + in an engine."""
    del now_s
    assert set(watched.endings.values()) <= {1}
    states = watched.scheduler.programs.values()
    waiting = sum(len(s.held) + len(s.running) for s in states)
    assert watched.num_asked == len(watched.endings) + waiting
