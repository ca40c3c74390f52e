"""The scheduling core: events in, commands out, the clock passed in.

`Scheduler` is the life of programs and requests; `queues.py` holds the moves that follow from it.
"""

from __future__ import annotations

from kvtier.errors import EventError
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.scheduling.admission import Admission, Load
from kvtier.scheduling.idleness import IdlenessRing
from kvtier.scheduling.queues import Queues, too_large
from kvtier.scheduling.settings import SchedulerSettings
from kvtier.scheduling.state import HeldRequest, ProgramState, Queue, WorkerState


class Scheduler(Queues):
    """One policy over all workers. Not thread-safe; no clock, no IO.

    `handle` raises EventError for an event that contradicts earlier ones (an unknown or repeated
    request, an unknown worker), with nothing changed. Reports with an old epoch are counted in
    `num_stale` and have no effect.
    """

    def __init__(
        self, settings: SchedulerSettings | None = None, admission: Admission | None = None
    ) -> None:
        super().__init__(settings, admission)
        self.num_stale = 0
        self._requests: dict[str, str] = {}
        self._ending: set[str] = set()
        self._now_s = float("-inf")
        self._sequence = 0
        self._handlers = {
            ev.WorkerUp: self._on_worker_up,
            ev.WorkerDown: self._on_worker_down,
            ev.ProgramArrived: self._on_program_arrived,
            ev.RequestArrived: self._on_request_arrived,
            ev.RequestForwarded: self._on_request_forwarded,
            ev.TokensProduced: self._on_tokens_produced,
            ev.ToolCalled: self._on_tool_called,
            ev.RequestFinished: self._on_request_finished,
            ev.RequestCancelled: self._on_request_cancelled,
            ev.ProgramReleased: self._on_program_released,
            ev.Residency: self._on_residency,
            ev.TransferFinished: self._on_transfer_finished,
            ev.TransferFailed: self._on_copy_lost,
            ev.CommandRefused: self._on_copy_lost,
            ev.EngineStats: self._on_engine_stats,
            ev.Tick: self._on_tick,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        """Take one event at `now_s` seconds; return what is to be done, in order.

        A time before the latest one counts as the latest: ages never shrink.
        """
        self._now_s = max(self._now_s, now_s)
        self._handlers[type(event)](event, self._now_s)  # type: ignore[operator]
        self._settle_waiters(self._now_s)
        out, self._out = self._out, []
        return out

    # Life of programs and requests ---------------------------------------------------------

    def _program(self, name: str) -> ProgramState:
        state = self.programs.get(name)
        if state is None:
            self._sequence += 1
            state = ProgramState(name, self._sequence, IdlenessRing(self.settings.window_k))
            self.programs[name] = state
        return state

    def _on_program_arrived(self, event: ev.ProgramArrived, now_s: float) -> None:
        del now_s
        _need(event, event.shared_tokens >= 0, "shared_tokens must not be negative")
        state = self._program(event.program)
        state.parent = event.parent
        self._share(state, event.shared_group, event.shared_tokens)

    def _share(self, state: ProgramState, group: str | None, shared_tokens: int) -> None:
        ledger = self._ledger(state)
        if ledger is not None:
            ledger.remove(state.program)
        state.shared_group, state.shared_tokens = group, shared_tokens
        if ledger is not None:
            ledger.add(state)

    def _on_request_arrived(self, event: ev.RequestArrived, now_s: float) -> None:
        _need(event, event.context_tokens >= 1, "context_tokens must be at least 1")
        if event.request in self._requests:
            raise EventError(f"request {event.request} arrived twice; give each request its own id")
        state = self._program(event.program)
        largest = self._largest_hbm()
        if largest is not None and event.context_tokens > largest:
            reason = too_large(event.context_tokens, largest)
            self._out.append(cmd.Reject(event.program, event.request, reason))
            return
        self._ending.discard(state.program)
        state.ring.gap_ended(now_s)
        state.tool = None
        self._resize(state, event.context_tokens)
        self._requests[event.request] = event.program
        state.held[event.request] = HeldRequest(event.request, now_s)
        self._leave_small_worker(state, now_s)
        if state.queue is Queue.GPU and not state.marked:
            self._forward_held(state)
        else:
            self._outside[state.program] = state
            if not state.running:
                self._try_enter(state, now_s, displace=True)
        if event.request in state.held:
            self._out.append(cmd.Hold(state.program, event.request, self._why_held(state)))
        self._shed_of(state, now_s)

    def _leave_small_worker(self, state: ProgramState, now_s: float) -> None:
        """A program that has outgrown its worker loses its place there, knowingly."""
        worker = self._worker_of(state)
        if worker is None or state.tokens <= worker.hbm_tokens or state.queue is Queue.WAITING:
            return
        if state.running and not state.marked:
            self._mark(worker, state)
        elif not state.running:
            self._capped.pop(state.program, None)
            self.lose_copy(state, now_s)

    def _shed_of(self, state: ProgramState, now_s: float) -> None:
        worker = self._worker_of(state)
        if worker is not None:
            self._shed(worker, now_s)

    def _why_held(self, state: ProgramState) -> str:
        if not self.workers:
            return "no worker is up"
        if state.queue is Queue.GPU:
            return "the program is leaving HBM" if state.marked else "the request cap is reached"
        return f"the program is in the {state.queue.value} queue"

    def _on_request_forwarded(self, event: ev.RequestForwarded, now_s: float) -> None:
        state = self._running_request(event.program, event.request)
        if state.reasoning_since_s is None:
            state.reasoning_since_s = now_s

    def _on_tokens_produced(self, event: ev.TokensProduced, now_s: float) -> None:
        del now_s
        _need(event, event.num_tokens >= 0, "num_tokens must not be negative")
        state = self._running_request(event.program, event.request)
        self._resize(state, state.tokens + event.num_tokens)

    def _on_tool_called(self, event: ev.ToolCalled, now_s: float) -> None:
        del now_s
        state = self.programs.get(event.program)
        if state is None:
            self.num_stale += 1
        else:
            state.tool = event.name

    def _running_request(self, program: str, request: str) -> ProgramState:
        state = self.programs.get(program)
        if state is None or request not in state.running:
            raise EventError(f"request {request} of program {program} is not running")
        return state

    def _on_request_finished(self, event: ev.RequestFinished, now_s: float) -> None:
        _need(event, event.context_tokens >= 1, "context_tokens must be at least 1")
        state = self._running_request(event.program, event.request)
        self._resize(state, event.context_tokens)
        state.num_steps += 1
        self._end_running(state, event.request, now_s)

    def _on_request_cancelled(self, event: ev.RequestCancelled, now_s: float) -> None:
        if self._requests.get(event.request) != event.program:
            raise EventError(f"request {event.request} of program {event.program} is unknown")
        state = self.programs[event.program]
        if event.request in state.running:
            self._end_running(state, event.request, now_s)
            return
        self._end_held(state, event.request)
        if not state.held and not state.running:
            state.ring.gap_resumed(now_s)
        self._room_grew = True  # it may have been the one that room was reserved for

    def _end_held(self, state: ProgramState, request: str) -> None:
        del self._requests[request], state.held[request]
        self._forget_waiter(state)

    def _forget_waiter(self, state: ProgramState) -> None:
        if not state.held:
            self._outside.pop(state.program, None)
            self._capped.pop(state.program, None)

    def _end_running(self, state: ProgramState, request: str, now_s: float) -> None:
        del self._requests[request]
        worker = state.running.pop(request)
        worker.num_running_requests -= 1
        self._worker_idle |= self.settings.swap_when_idle and not worker.num_running_requests
        if not state.running:
            since_s = now_s if state.reasoning_since_s is None else state.reasoning_since_s
            state.reasoning_since_s = None
            state.ring.inference_ended(now_s - since_s, now_s)
            if state.held:
                state.ring.gap_ended(now_s)
            if state.program in self._ending:
                self._remove(state)
            elif state.marked:
                self._leave(state, now_s)
        self._shed_of(state, now_s)

    def _on_program_released(self, event: ev.ProgramReleased, now_s: float) -> None:
        state = self.programs.get(event.program)
        if state is None:
            self.num_stale += 1
            return
        for request in list(state.held):
            self._end_held(state, request)
            self._out.append(cmd.Reject(state.program, request, "the program was released"))
        if state.running:
            self._ending.add(state.program)
            return
        self._remove(state)

    def _remove(self, state: ProgramState) -> None:
        ledger = self._ledger(state)
        if ledger is not None:
            ledger.remove(state.program)
        state.queue = Queue.WAITING
        state.epoch = self._next_epoch()
        self._ending.discard(state.program)
        self._room_grew = True
        self._forget_waiter(state)
        del self.programs[state.program]
        if state.worker is not None:
            self._out.append(cmd.Drop(state.program, state.worker, state.epoch))

    # Workers and their reports -------------------------------------------------------------

    def _on_worker_up(self, event: ev.WorkerUp, now_s: float) -> None:
        _need(event, event.hbm_tokens >= 1, "hbm_tokens must be at least 1")
        _need(event, event.dram_tokens >= 0, "dram_tokens must not be negative")
        if event.worker in self.workers:
            raise EventError(f"worker {event.worker} is up already; send WorkerDown first")
        limit = int(event.hbm_tokens * (1.0 - self.settings.hbm_headroom))
        self.workers[event.worker] = WorkerState(
            event.worker, event.hbm_tokens, event.dram_tokens, limit
        )
        self._room_grew = True

    def _on_worker_down(self, event: ev.WorkerDown, now_s: float) -> None:
        if self.workers.pop(event.worker, None) is None:
            raise EventError(f"worker {event.worker} is not up")
        self.admission.forget(event.worker)
        for state in self.programs.values():
            if state.worker != event.worker:
                continue
            state.worker = None  # its ledgers went with the worker
            self._place(state, Queue.WAITING, now_s)
            self._capped.pop(state.program, None)
            if state.held:
                self._outside[state.program] = state
        self._room_grew = True

    def _on_residency(self, event: ev.Residency, now_s: float) -> None:
        counts = (event.hbm_private_tokens, event.dram_private_tokens, event.shared_tokens)
        _need(event, min(counts) >= 0, "token counts must not be negative")
        state = self._current(event.program, event.epoch)
        if state is None:
            return
        if event.shared_group is not None:
            self._share(state, event.shared_group, event.shared_tokens)
        if state.queue is not Queue.CPU:
            return
        state.kept_tokens = event.hbm_private_tokens + event.dram_private_tokens
        self._resize(state, state.tokens)
        whole = min(state.placed_tokens, state.private_tokens)
        if state.kept_tokens < whole * self.settings.min_kept_share:
            self.lose_copy(state, now_s)

    def _on_transfer_finished(self, event: ev.TransferFinished, now_s: float) -> None:
        del now_s
        self._current(event.program, event.epoch)

    def _on_copy_lost(self, event: ev.TransferFailed | ev.CommandRefused, now_s: float) -> None:
        """A program whose way down failed has no copy in DRAM; it loses its place there."""
        state = self._current(event.program, event.epoch)
        if state is not None and state.queue is Queue.CPU:
            self.lose_copy(state, now_s)

    def _current(self, program: str, epoch: int) -> ProgramState | None:
        state = self.programs.get(program)
        if state is None or state.epoch != epoch:
            self.num_stale += 1
            return None
        return state

    def _on_engine_stats(self, event: ev.EngineStats, now_s: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            raise EventError(f"worker {event.worker} sent stats but is not up")
        _need(event, event.capacity_tokens >= 1, "capacity_tokens must be at least 1")
        counts = (event.locked_tokens, event.cached_tokens, event.prompt_tokens)
        _need(event, min(counts) >= 0, "token counts must not be negative")
        load = Load(worker.num_gpu, len(self._outside), len(self.programs))
        if self.admission.observe(event, load, now_s):
            self._shed(worker, now_s)
            self._room_grew = True

    def _on_tick(self, event: ev.Tick, now_s: float) -> None:
        del event
        for worker in self.workers.values():
            self._shed(worker, now_s)
            self.trim_dram(worker, now_s)
        self._fill(now_s, displace=True)


def _need(event: ev.Event, holds: bool, rule: str) -> None:
    """Refuse a report that cannot be true, before anything is changed."""
    if not holds:
        raise EventError(f"{event}: {rule}")
