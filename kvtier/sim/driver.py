"""The simulated world around a scheduler: clients, engines, and the clock they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import CapacityError, SimulationError
from kvtier.hardware import kv_capacity_tokens
from kvtier.ids import Direction, Label
from kvtier.scheduling import build, policy
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.sim.cache import LinkMover, WorkerCache
from kvtier.sim.cost import StepCost
from kvtier.sim.engine import Engine
from kvtier.sim.heap import EventHeap
from kvtier.sim.link import Link
from kvtier.sim.prompts import Prompts
from kvtier.sim.record import Recorder
from kvtier.sim.request import EngineRequest
from kvtier.sim.settings import SimSettings
from kvtier.sim.workload import Instance, Mode, Plan, instances
from kvtier.tiering.room import TierMode
from kvtier.transfer.link import LinkSpec

_UNBOUNDED_PAGES = 10**9
_STALL_S = 4 * 3600.0
# At one instant clients and engines act first, then reports, then the tick that sees them all.
_REPORTS, _TICK = 1, 2


@dataclass(slots=True)
class _Running:
    """A program that is alive: its plan, and the next step to take."""

    instance: Instance
    slot: bool
    next_step: int = 0
    computed_tokens: int = 0
    """Length of its last context, without the last token, whose KV is never written."""
    request: str | None = None
    arrived_s: float = 0.0
    kept_reported: int = -1
    epoch: int = 0


class Simulation:
    """One run. Build it, call `run`, read `recorder`."""

    def __init__(
        self,
        settings: SimSettings,
        plans: tuple[Plan, ...],
        on_progress: Callable[[float, int], None] = lambda now_s, num_ended: None,
    ) -> None:
        self.settings = settings
        self.spec = policy(settings.policy)
        self.heap = EventHeap()
        self.scheduler = build(
            settings.policy, settings.admission, settings.scheduler, settings.concur
        )
        self.engines: dict[str, Engine] = {}
        self._prompts = Prompts(settings.page_size)
        self.recorder = Recorder()
        self._on_progress = on_progress
        self._plans = plans
        self._next = instances(plans, settings.seed)
        self._alive: dict[str, _Running] = {}
        self._requests: dict[str, tuple[_Running, EngineRequest]] = {}
        self._num_open = 0
        self._num_requests = 0
        self._handlers: dict[type, Callable[..., None]] = {
            cmd.Forward: self._forward,
            cmd.Hold: lambda command: None,
            cmd.Reject: self._reject,
            cmd.Demote: self._demote,
            cmd.Promote: self._count,
            cmd.Drop: self._drop,
            cmd.SetLabel: self._set_label,
            cmd.Route: self._count,
        }

    # Set-up --------------------------------------------------------------------------------

    def _build_engine(self) -> tuple[Engine, int, int]:
        settings, spec = self.settings, self.spec
        layout = settings.model.layout(settings.tp, settings.page_size)
        hbm = kv_capacity_tokens(
            settings.model,
            settings.gpu,
            settings.tp,
            settings.mem_fraction,
            page_size=settings.page_size,
        )
        dram = int(hbm * settings.dram_ratio) if spec.offload else 0
        hbm = _UNBOUNDED_PAGES * settings.page_size if spec.unbounded else hbm
        mode = TierMode(spec.offload, spec.write_through, spec.labels)
        link = Link(
            self.heap,
            LinkSpec(
                settings.copy_path,
                layout.fragment_bytes(),
                float(settings.gpu.link_bytes_per_s),
                float(settings.gpu.link_duplex_bytes_per_s),
            ),
            settings.tp,
        )
        cost = StepCost(settings.model, settings.gpu, settings.tp, settings.efficiency)
        mover = LinkMover(link, layout.bytes_per_token_all_ranks * settings.page_size)
        cache = WorkerCache(hbm, dram, mode, settings.page_size, mover, self._prompts)
        engine = Engine(self.heap, cache, cost, settings.engine)
        return engine, cache.capacity, cache.dram_capacity

    def _start(self) -> None:
        for index in range(self.settings.num_workers):
            name = f"w{index}"
            self.engines[name], hbm, dram = self._build_engine()
            self._check_fit(hbm)
            self._tell(ev.WorkerUp(name, hbm, dram))
        count = self.settings.num_programs
        if self.settings.mode is Mode.OPEN:
            for plan in self._plans:
                self._open(Instance(f"{plan.name}#0", plan), plan.start_s, slot=False)
        else:
            ramp_s = self.settings.ramp_s if self.settings.mode is Mode.CLOSED else 0.0
            for index in range(count):
                self._open(next(self._next), ramp_s * index / count, slot=True)
        self.heap.at(0.0, self._report, _REPORTS)
        self.heap.at(self.settings.scheduler.tick_s, self._tick, _TICK)
        self.heap.at(0.0, self._sample, _REPORTS)

    def _check_fit(self, hbm_tokens: int) -> None:
        smallest = min(plan.steps[0].context_tokens for plan in self._plans)
        if smallest > hbm_tokens:
            raise CapacityError(
                f"no program fits: the smallest first prompt has {smallest} tokens, HBM holds "
                f"{hbm_tokens}; use more --tp, a larger GPU or a smaller model"
            )

    def run(self) -> None:
        """Run to the end. KeyboardInterrupt ends the run early and marks it partial."""
        self._start()
        end_s = self.settings.duration_s
        if self.settings.mode is Mode.BATCH:
            end_s = float("inf")
        try:
            while self.heap.step(end_s):
                if not self._num_open and self.settings.mode is not Mode.CLOSED:
                    self.recorder.ran_out = True
                    break
            else:
                self.heap.now_s = end_s
        except KeyboardInterrupt:
            self.recorder.partial = True
        self.recorder.sample(self.heap.now_s, self.engines, self.scheduler, self._alive)
        self.recorder.close(
            self.heap.now_s, self._requests.values(), self.engines.values(), self.scheduler
        )

    # Clients -------------------------------------------------------------------------------

    def _open(self, instance: Instance, at_s: float, *, slot: bool) -> None:
        self._num_open += 1
        running = _Running(instance, slot)

        def arrive(now_s: float) -> None:
            self._alive[instance.program] = running
            self.recorder.programs += 1
            plan = instance.plan
            self._tell(
                ev.ProgramArrived(instance.program, instance.parent, plan.group, plan.head_tokens)
            )
            self._ask(running, now_s)

        self.heap.at(at_s, arrive)

    def _ask(self, running: _Running, now_s: float) -> None:
        plan = running.instance.plan
        step = plan.steps[running.next_step]
        self._num_requests += 1
        request = EngineRequest(
            f"r{self._num_requests}",
            running.instance.program,
            step.context_tokens,
            step.output_tokens,
            min(step.reused_tokens, running.computed_tokens),
            plan.group,
            plan.head_tokens,
        )
        request.on_first_token = lambda t: self.recorder.ttft_s.append(t - running.arrived_s)
        request.on_finish = lambda t: self._finished(running, request, t)
        running.request, running.arrived_s = request.request, now_s
        self._requests[request.request] = (running, request)
        self._tell(ev.RequestArrived(request.program, request.request, request.context_tokens))

    def _finished(self, running: _Running, request: EngineRequest, now_s: float) -> None:
        del self._requests[request.request]
        running.request = None
        running.computed_tokens = request.context_tokens
        plan, step = running.instance.plan, running.next_step
        running.next_step += 1
        self.recorder.steps += 1
        self._tell(ev.RequestFinished(request.program, request.request, request.context_tokens + 1))
        for after, child in plan.children:
            if after == step:
                self.recorder.subagents += 1
                name = f"{running.instance.program}/{child.name}"
                self._open(Instance(name, child, running.instance.program), now_s, slot=False)
        if running.next_step == len(plan.steps):
            self._end(running, now_s)
            return
        done = plan.steps[step]
        if done.tool is not None:
            self._tell(ev.ToolCalled(request.program, done.tool))
        self.heap.at(now_s + done.gap_s, lambda t: self._ask(running, t))

    def _end(self, running: _Running, now_s: float) -> None:
        program = running.instance.program
        del self._alive[program]
        self._prompts.forget(program)
        self._num_open -= 1
        self.recorder.programs_ended += 1
        self.recorder.compactions += running.instance.plan.num_compactions
        self._tell(ev.ProgramReleased(program))
        if running.slot and self.settings.mode is Mode.CLOSED:
            self._open(next(self._next), now_s, slot=True)

    # Commands ------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        for command in self.scheduler.handle(event, self.heap.now_s):
            self._handlers[type(command)](command)

    def _forward(self, command: cmd.Forward) -> None:
        running, request = self._requests[command.request]
        self.recorder.held_s += self.heap.now_s - running.arrived_s
        self._tell(ev.RequestForwarded(command.program, command.request))
        self.engines[command.worker].submit(request)

    def _reject(self, command: cmd.Reject) -> None:
        running, _ = self._requests.pop(command.request)
        running.request = None
        self.recorder.rejected += 1
        # The client gives up a tick later: an instant answer must not make time stand still.
        self.heap.at(
            self.heap.now_s + self.settings.scheduler.tick_s, lambda t: self._end(running, t)
        )

    def _count(self, command: cmd.Promote | cmd.Route) -> None:
        if isinstance(command, cmd.Promote):
            self.recorder.moves["promote"] += 1
            self._note_epoch(command.program, command.epoch)
            return
        self.recorder.routed(command.program, command.worker)

    def _note_epoch(self, program: str, epoch: int) -> None:
        running = self._alive.get(program)
        if running is not None:
            running.epoch, running.kept_reported = epoch, -1

    def _demote(self, command: cmd.Demote) -> None:
        self.recorder.moves["demote"] += 1
        self._note_epoch(command.program, command.epoch)

        def done(now_s: float, tokens: int) -> None:
            del now_s
            self._tell(ev.TransferFinished(command.program, command.epoch, Direction.D2H, tokens))

        if not self.engines[command.worker].demote(command.program, done):
            self.recorder.moves["refused"] += 1
            self._tell(
                ev.CommandRefused(command.program, command.epoch, "DRAM has no room for the copy")
            )

    def _drop(self, command: cmd.Drop) -> None:
        if self.spec.labels:
            self.engines[command.worker].cache.drop(command.program)

    def _set_label(self, command: cmd.SetLabel) -> None:
        if command.label is Label.INACTIVE:
            self.recorder.moves["drop"] += 1
        self._note_epoch(command.program, command.epoch)
        self.engines[command.worker].cache.relabel(command.program, command.label)

    # Periods -------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        for engine in self.engines.values():
            for request, tokens in engine.produced_since_report():
                self._tell(ev.TokensProduced(request.program, request.request, tokens))
        if self.spec.labels:
            self._report_residency()
        self._tell(ev.Tick())
        self._on_progress(now_s, self.recorder.programs_ended)
        if self.recorder.stalled_s(now_s, len(self._requests)) > _STALL_S:
            raise SimulationError(
                f"no request finished in {_STALL_S / 3600:.0f} simulated hours; "
                f"{len(self._requests)} wait: report this run with its seed"
            )
        self.heap.at(now_s + self.settings.scheduler.tick_s, self._tick, _TICK)

    def _report_residency(self) -> None:
        """Tell of idle programs whose kept KV changed since the last report."""
        for name, running in list(self._alive.items()):
            state = self.scheduler.programs.get(name)
            if state is None or state.worker is None or running.request is not None:
                continue
            head = running.instance.plan.head_tokens
            in_hbm, kept = self.engines[state.worker].cache.kept(name)
            hbm, kept = max(in_hbm - head, 0), max(kept - head, 0)
            if kept != running.kept_reported:
                running.kept_reported = kept
                self._tell(ev.Residency(name, running.epoch, hbm, kept - hbm))

    def _report(self, now_s: float) -> None:
        for name, engine in self.engines.items():
            total, cache = engine.counters, engine.cache
            self._tell(
                ev.EngineStats(
                    name, cache.locked, cache.capacity, total.prompt, total.hbm_hit + total.dram_hit
                )
            )
        self.heap.at(now_s + self.settings.concur.interval_s, self._report, _REPORTS)

    def _sample(self, now_s: float) -> None:
        self.recorder.sample(now_s, self.engines, self.scheduler, self._alive)
        self.heap.at(now_s + self.settings.sample_s, self._sample, _REPORTS)
