"""The queues of every policy: who is in, who is held, and the two loops that fill and shed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvtier.scheduling import commands as cmd
from kvtier.scheduling.admission import Admission, NoAdmission
from kvtier.scheduling.settings import SchedulerSettings
from kvtier.scheduling.state import Ledger, ProgramState, Queue, Status, WorkerState


class Queues(ABC):
    """Queue state and moves, with the questions that a policy answers.

    A policy says who goes first, who goes away, and where to; see `lru.py` and `mori.py`.
    """

    name: str

    def __init__(
        self, settings: SchedulerSettings | None = None, admission: Admission | None = None
    ) -> None:
        self.settings = settings if settings is not None else SchedulerSettings()
        self.admission = admission if admission is not None else NoAdmission()
        self.programs: dict[str, ProgramState] = {}
        self.workers: dict[str, WorkerState] = {}
        self._outside: dict[str, ProgramState] = {}
        self._capped: dict[str, ProgramState] = {}
        self._reserved: dict[str, str] = {}
        self._out: list[cmd.Command] = []
        self._num_entries = 0
        self._num_epochs = 0
        self._room_grew = False
        self._worker_idle = False  # since the last event one of them has run out of work

    # What a policy decides -----------------------------------------------------------------

    @abstractmethod
    def rank(self, state: ProgramState, now_s: float) -> float:
        """How idle the program counts; the highest leaves first."""

    @abstractmethod
    def promotion_key(self, state: ProgramState, now_s: float) -> tuple[float, ...]:
        """Sort key among held programs outside the GPU queue; the lowest enters first."""

    @abstractmethod
    def fits(self, worker: WorkerState, state: ProgramState) -> bool:
        """Whether the worker's memory takes the program as things stand."""

    @abstractmethod
    def overflows(self, worker: WorkerState) -> bool:
        """Whether programs must leave the GPU queue for lack of memory."""

    @abstractmethod
    def displaced(
        self, worker: WorkerState, state: ProgramState, now_s: float, *, forced: bool
    ) -> list[ProgramState]:
        """Idle residents that must go for a held program to enter; empty when that is refused.

        `forced` sets margins aside, and may mark running programs so that room comes later.
        """

    @abstractmethod
    def depart(self, state: ProgramState, now_s: float) -> None:
        """Move an idle program of the GPU queue to its next place, and say so to its worker."""

    @abstractmethod
    def settle(self, state: ProgramState, previous: Queue) -> None:
        """Emit the commands of a program that has just entered the GPU queue."""

    @abstractmethod
    def lose_copy(self, state: ProgramState, now_s: float) -> None:
        """Send a CPU-queue program to waiting; its worker may free what is left of it."""

    def settled(self, state: ProgramState, now_s: float) -> bool:
        """Whether the program has been where it is for long enough to be moved without need."""
        del state, now_s
        return True

    def trim_dram(self, worker: WorkerState, now_s: float) -> None:
        """Bring the worker's CPU queue back within its DRAM."""
        del worker, now_s

    @abstractmethod
    def targets(self, state: ProgramState) -> list[WorkerState]:
        """Workers whose GPU queue the program may enter, best first."""

    # Moves ---------------------------------------------------------------------------------

    def _worker_of(self, state: ProgramState) -> WorkerState | None:
        return self.workers.get(state.worker) if state.worker is not None else None

    def _ledger(self, state: ProgramState) -> Ledger | None:
        worker = self._worker_of(state)
        return worker.ledger_of(state) if worker is not None else None

    def _resize(self, state: ProgramState, tokens: int) -> None:
        self._room_grew |= tokens < state.tokens
        state.tokens = tokens
        ledger = self._ledger(state)
        if ledger is not None:
            ledger.update(state)

    def _place(self, state: ProgramState, queue: Queue, now_s: float) -> None:
        """Move a program between queues of its worker; ledgers follow."""
        self._room_grew |= state.queue is not Queue.WAITING
        ledger = self._ledger(state)
        if ledger is not None:
            ledger.remove(state.program)
        state.queue, state.marked = queue, False
        state.placed_tokens = state.kept_tokens = state.private_tokens
        state.epoch = self._next_epoch()
        state.num_moves += 1
        state.moved_s = now_s
        ledger = self._ledger(state)
        if ledger is not None:
            ledger.add(state)

    def _next_epoch(self) -> int:
        """Epochs rise over all programs, so that no report of a former life can be current."""
        self._num_epochs += 1
        return self._num_epochs

    def _enter(self, worker: WorkerState, state: ProgramState, now_s: float) -> None:
        previous, old_worker = state.queue, state.worker
        if old_worker != worker.worker:
            assert previous is Queue.WAITING, f"{state.program} would leave its copy behind"
            state.worker = worker.worker
            if old_worker is not None:
                self._out.append(cmd.Drop(state.program, old_worker, self._next_epoch()))
            self._out.append(cmd.Route(state.program, worker.worker))
        self._place(state, Queue.GPU, now_s)
        self._num_entries += 1
        state.entered = self._num_entries
        self._outside.pop(state.program, None)
        self.settle(state, previous)
        self._forward_held(state)

    def _swap(
        self, worker: WorkerState, state: ProgramState, leavers: list[ProgramState], now_s: float
    ) -> None:
        before = len(self._out)
        self._enter(worker, state, now_s)
        entering = self._out[before:]
        del self._out[before:]
        # Entered first, so that its room in DRAM counts; said last, so that HBM room is on its way.
        for leaver in leavers:
            self._leave(leaver, now_s)
        self._out += entering

    def _leave(self, state: ProgramState, now_s: float) -> None:
        """Take a program that runs nothing out of the GPU queue."""
        self._capped.pop(state.program, None)
        worker = self._worker_of(state)
        if worker is not None and state.tokens > worker.hbm_tokens:
            self.lose_copy(state, now_s)  # it could never come back here
        else:
            self.depart(state, now_s)
        if state.held:
            self._outside[state.program] = state

    def _mark(self, worker: WorkerState, state: ProgramState) -> None:
        """Lazy demotion (MORI section 4.3.1): it leaves when its running inference ends."""
        worker.staying.remove(state.program)
        state.marked = True
        worker.leaving.add(state)
        if self._capped.pop(state.program, None) is not None:
            self._outside[state.program] = state

    def _forward_held(self, state: ProgramState) -> None:
        worker = self._worker_of(state)
        assert worker is not None, f"{state.program} is in a GPU queue without a worker"
        window = self.admission.request_window(worker.worker)
        for request in list(state.held):
            if worker.num_running_requests >= window:
                self._capped[state.program] = state
                return
            del state.held[request]
            state.running[request] = worker
            worker.num_running_requests += 1
            self._out.append(cmd.Forward(state.program, request, worker.worker))
        self._capped.pop(state.program, None)

    # Fill and shed -------------------------------------------------------------------------

    def _has_slot(self, worker: WorkerState) -> bool:
        return worker.num_gpu < self.admission.program_window(worker.worker)

    def _try_enter(
        self, state: ProgramState, now_s: float, *, displace: bool, forced: bool = False
    ) -> bool:
        targets = [
            worker
            for worker in self.targets(state)
            if self._reserved.get(worker.worker, state.program) == state.program
        ]
        for worker in targets:
            if self._has_slot(worker) and self.fits(worker, state):
                self._enter(worker, state, now_s)
                return True
        if displace or forced:
            for worker in targets:
                leavers = self.displaced(worker, state, now_s, forced=forced)
                if leavers:
                    self._swap(worker, state, leavers, now_s)
                    return True
        if forced and targets:
            self._reserved[targets[0].worker] = state.program
        return False

    def _settle_waiters(self, now_s: float) -> None:
        """After any event: forward what a request cap held, and fill if room has appeared."""
        for state in list(self._capped.values()):
            worker = self._worker_of(state)
            assert worker is not None, f"{state.program} waits for a slot of no worker"
            if state.tokens <= worker.hbm_tokens:
                self._forward_held(state)
            elif not state.running:
                self._leave(state, now_s)
        idle, self._worker_idle = self._worker_idle, False
        if self._room_grew or (idle and self._outside):
            self._fill(now_s, displace=idle)

    def _fill(self, now_s: float, *, displace: bool = False) -> None:
        """Let held programs in, best first. One held for too long goes before all others."""
        self._room_grew = False
        self._reserved.clear()
        self._refuse_oversized()
        waiters = [state for state in self._outside.values() if not state.running]
        starved_s = now_s - self.settings.max_hold_s
        starving = {s.program for s in waiters if s.held_since_s() <= starved_s}
        waiters.sort(
            key=lambda s: (
                (0, s.held_since_s()) if s.program in starving else (1, 0.0),
                self.promotion_key(s, now_s),
                s.sequence,
            )
        )
        for state in waiters:
            self._try_enter(state, now_s, displace=displace, forced=state.program in starving)

    def _largest_hbm(self) -> int | None:
        return max((w.hbm_tokens for w in self.workers.values()), default=None)

    def _refuse_oversized(self) -> None:
        """End the held requests of programs that no worker that is up could ever run."""
        largest = self._largest_hbm()
        if largest is None:
            return
        for state in [s for s in self._outside.values() if s.tokens > largest]:
            reason = too_large(state.tokens, largest)
            for request in list(state.held):
                self._end_held(state, request)
                self._out.append(cmd.Reject(state.program, request, reason))

    @abstractmethod
    def _end_held(self, state: ProgramState, request: str) -> None:
        """Forget a held request."""

    def _over(self, worker: WorkerState) -> bool:
        window = self.admission.program_window(worker.worker)
        return len(worker.staying) > window or self.overflows(worker)

    def _shed(self, worker: WorkerState, now_s: float) -> None:
        """Send programs away until window and memory hold; running ones are marked instead."""
        if not self._over(worker):
            return
        for state in self.victims(worker, now_s):
            if state.running:
                self._mark(worker, state)
            else:
                self._leave(state, now_s)
            if not self._over(worker):
                return

    def victims(self, worker: WorkerState, now_s: float) -> list[ProgramState]:
        """The worker's staying programs in the order in which they leave.

        Acting ones before held ones before running ones; within these, programs that have just
        moved come last where the policy says so, then the highest rank goes first.
        """
        order = {Status.ACTING: 0, Status.HELD: 1, Status.REASONING: 2}

        def key(state: ProgramState) -> tuple[int, bool, float, int]:
            rank = self.rank(state, now_s)
            unsettled = not self.settled(state, now_s)
            return (order[state.status], unsettled, -rank, -state.entered)

        return sorted((self.programs[name] for name in worker.staying), key=key)

    def check_integrity(self) -> None:
        """Compare every sum and index with the programs themselves; AssertionError on a drift."""
        for worker in self.workers.values():
            mine = [s for s in self.programs.values() if s.worker == worker.worker]
            for ledger in (worker.staying, worker.leaving, worker.cpu):
                ledger.check_integrity(s for s in mine if worker.ledger_of(s) is ledger)
            running = sum(at is worker for s in self.programs.values() for at in s.running.values())
            counted = worker.num_running_requests
            assert running == counted, f"{worker.worker}: {running} requests run, counted {counted}"
        self._check_waiters(self.programs.values())

    def _check_waiters(self, states: Iterable[ProgramState]) -> None:
        for state in states:
            inside = state.queue is Queue.GPU and not state.marked
            waits_in = (state.program in self._outside, state.program in self._capped)
            expected = (bool(state.held) and not inside, bool(state.held) and inside)
            assert waits_in == expected, f"{state.program} waits in {waits_in}, not {expected}"
            assert state.queue is Queue.WAITING or state.worker in self.workers, state.program


def too_large(tokens: int, largest: int) -> str:
    """Why a program is refused; for its client."""
    return f"{tokens} tokens exceed the largest HBM pool, {largest} tokens; shorten the context"
