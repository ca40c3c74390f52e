"""What a run leaves behind: totals, first-token times, and series over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvtier.scheduling import Scheduler
from kvtier.scheduling.state import Queue
from kvtier.sim.engine import Engine
from kvtier.sim.request import EngineCounters


class Recorder:
    """Collects while a simulation runs. Times in simulated seconds."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.unanswered_s: list[float] = []
        """Ages of the requests that had no first token at the end of the run."""
        self.held_s = 0.0
        self.programs = 0
        self.programs_ended = 0
        self.subagents = 0
        self.steps = 0
        self.rejected = 0
        self.compactions = 0
        self.switches = 0
        self.moves: Counter[str] = Counter()
        self.series: dict[str, list[float]] = {}
        self.partial = False
        self.ran_out = False
        """All programs have ended (batch and open mode)."""
        self.end_s = 0.0
        self._workers: dict[str, str] = {}
        self._seen_steps = 0
        self._seen_s = 0.0
        self._hits_before: tuple[int, int] = (0, 0)

    def routed(self, program: str, worker: str) -> None:
        """The program goes to `worker` from here on."""
        previous = self._workers.get(program)
        self._workers[program] = worker
        self.switches += previous is not None and previous != worker

    def stalled_s(self, now_s: float, num_pending: int) -> float:
        """How long requests have been pending without any step having ended."""
        if self.steps != self._seen_steps or not num_pending:
            self._seen_steps, self._seen_s = self.steps, now_s
        return now_s - self._seen_s

    def close(
        self,
        now_s: float,
        pending: Iterable[Any],
        engines: Iterable[Engine],
        scheduler: Scheduler,
    ) -> None:
        """The run is over at `now_s`; requests without a first token count at their age."""
        self.end_s = now_s
        for running, request in pending:
            if request.produced == 0:
                self.unanswered_s.append(now_s - running.arrived_s)
        if self.partial:
            return  # an interrupt may have cut an event in half
        for engine in engines:
            engine.check_integrity()
        scheduler.check_integrity()

    def sample(
        self,
        now_s: float,
        engines: Mapping[str, Engine],
        scheduler: Scheduler,
        alive: Mapping[str, Any],
    ) -> None:
        """Add one point to every series, one for each time."""
        if self.series and self.series["t_s"][-1] == now_s:
            return
        capacity = sum(e.cache.capacity for e in engines.values())
        prompt = sum(e.counters.prompt for e in engines.values())
        hits = sum(e.counters.hbm_hit + e.counters.dram_hit for e in engines.values())
        new_prompt, new_hits = prompt - self._hits_before[0], hits - self._hits_before[1]
        self._hits_before = (prompt, hits)
        window = sum(scheduler.admission.program_window(name) for name in engines)
        places = self._places(engines, scheduler, alive)
        self._add(
            t_s=now_s,
            usage=sum(e.cache.locked for e in engines.values()) / capacity,
            hbm_used=sum(e.cache.capacity - e.cache.free for e in engines.values()) / capacity,
            hit_rate=new_hits / new_prompt if new_prompt else float("nan"),
            window=window,
            running=float(sum(e.num_running for e in engines.values())),
            queued=float(sum(len(e.waiting) for e in engines.values())),
            held=float(sum(bool(s.held) for s in scheduler.programs.values())),
            admitted=float(sum(s.queue is Queue.GPU for s in scheduler.programs.values())),
            in_hbm=float(places["hbm"]),
            in_dram=float(places["dram"]),
            nowhere=float(places["nowhere"]),
            output_tokens=float(sum(e.counters.output for e in engines.values())),
        )

    def _add(self, **point: float) -> None:
        for name, value in point.items():
            self.series.setdefault(name, []).append(value)

    @staticmethod
    def _places(
        engines: Mapping[str, Engine], scheduler: Scheduler, alive: Mapping[str, Any]
    ) -> Counter[str]:
        """Where most of each live program's context is."""
        places: Counter[str] = Counter()
        for name in alive:
            state = scheduler.programs.get(name)
            worker = state.worker if state is not None else None
            if state is None or worker is None:
                places["nowhere"] += 1
                continue
            in_hbm, kept = engines[worker].cache.kept(name)
            if 2 * (in_hbm - state.head_tokens) >= state.private_tokens:
                places["hbm"] += 1
            elif 2 * (kept - state.head_tokens) >= state.private_tokens:
                places["dram"] += 1
            else:
                places["nowhere"] += 1
        return places


def total(engines: Iterable[Engine]) -> EngineCounters:
    """Counters summed over workers."""
    result = EngineCounters()
    for engine in engines:
        for name in EngineCounters.__slots__:
            setattr(result, name, getattr(result, name) + getattr(engine.counters, name))
    return result
