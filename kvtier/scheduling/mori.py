"""MORI: the least idle programs live in HBM, the most idle in DRAM, the rest wait (section 4)."""

from __future__ import annotations

from kvtier.ids import Label
from kvtier.scheduling import commands as cmd
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.state import Ledger, ProgramState, Queue, Status, WorkerState


class Mori(Scheduler):
    """Queues by memory, ranked by idleness.

    Demotion (4.3.1): when a GPU queue exceeds its HBM, acting programs leave, highest iota first;
    running ones are marked. Promotion (4.3.2): held CPU-queue programs, then returning waiting
    ones, both by lowest iota, then new ones, smallest context first. Swap (4.3): a held program
    displaces acting residents that are idler by a margin and have been in their gap for a while;
    `swap_when_idle` sets that aside on a worker that runs nothing.
    """

    name = "mori"

    def rank(self, state: ProgramState, now_s: float) -> float:
        return state.ring.value(now_s)

    @property
    def margin(self) -> float:
        """How much higher a resident's rank must be for a swap."""
        return self.settings.swap_margin

    def promotion_key(self, state: ProgramState, now_s: float) -> tuple[float, ...]:
        if state.queue is Queue.CPU:
            return (0.0, self.rank(state, now_s))
        if state.num_steps > 0:
            return (1.0, self.rank(state, now_s))
        return (2.0, float(state.tokens))

    def fits(self, worker: WorkerState, state: ProgramState) -> bool:
        return worker.fits(state)

    def overflows(self, worker: WorkerState) -> bool:
        tokens = worker.staying.tokens
        # One program alone may use the headroom too.
        limit = worker.limit_tokens if len(worker.staying) > 1 else worker.hbm_tokens
        return tokens > limit

    def targets(self, state: ProgramState) -> list[WorkerState]:
        own = self._worker_of(state)
        if state.queue is Queue.CPU:
            return [own] if own is not None else []
        large = [w for w in self.workers.values() if state.tokens <= w.hbm_tokens]
        return sorted(large, key=lambda w: (-w.free_tokens, w.worker))

    def settled(self, state: ProgramState, now_s: float) -> bool:
        return now_s - state.moved_s >= self.settings.dwell_s

    def displaced(
        self, worker: WorkerState, state: ProgramState, now_s: float, *, forced: bool
    ) -> list[ProgramState]:
        forced |= self.settings.swap_when_idle and not worker.num_running_requests
        candidates = self._displaceable(worker, state, now_s, forced=forced)
        if not candidates and not forced:
            return []
        staying, chosen = worker.staying.clone(), []
        for resident in candidates:
            staying.remove(resident.program)
            chosen.append(resident)
            if worker.fits(state, staying):
                sheltered = forced or state.queue is Queue.CPU or self._shelters(worker, chosen)
                return chosen if sheltered else []
        if forced:
            self._mark_enough(worker, state, staying, now_s)
        return []

    def _displaceable(
        self, worker: WorkerState, state: ProgramState, now_s: float, *, forced: bool
    ) -> list[ProgramState]:
        """Acting residents that the mismatch rule lets `state` displace, idlest first."""
        if forced:
            return [s for s in self.victims(worker, now_s) if s.status is Status.ACTING]
        least = self.rank(state, now_s) + self.margin
        found: list[tuple[float, int, ProgramState]] = []
        for name in worker.staying:
            resident = self.programs[name]
            # A running or held one has no running gap, so its age is 0.
            if resident.ring.gap_age_s(now_s) < self.settings.swap_min_gap_s:
                continue
            rank = self.rank(resident, now_s)
            if rank > least and resident.status is Status.ACTING and self.settled(resident, now_s):
                found.append((-rank, -resident.entered, resident))
        found.sort(key=lambda entry: entry[:2])
        return [resident for _, _, resident in found]

    def _shelters(self, worker: WorkerState, leavers: list[ProgramState]) -> bool:
        """Whether DRAM takes them all: a program without KV must not cost another its own."""
        cpu = worker.cpu.clone()
        for leaver in leavers:
            cpu.add(leaver)
        return cpu.tokens <= worker.dram_tokens

    def _mark_enough(
        self, worker: WorkerState, state: ProgramState, staying: Ledger, now_s: float
    ) -> None:
        """Mark running residents until what is left, when they are gone, lets `state` in."""
        for resident in self.victims(worker, now_s):
            if self._fits_later(worker, state, staying):
                return
            if resident.running:
                staying.remove(resident.program)
                self._mark(worker, resident)

    @staticmethod
    def _fits_later(worker: WorkerState, state: ProgramState, staying: Ledger) -> bool:
        if not len(staying):
            return True
        return staying.tokens + staying.cost_tokens(state) <= worker.limit_tokens

    def settle(self, state: ProgramState, previous: Queue) -> None:
        assert state.worker is not None
        self._out.append(cmd.SetLabel(state.program, state.worker, Label.BUSY, state.epoch))
        if previous is Queue.CPU:
            self._out.append(cmd.Promote(state.program, state.worker, state.epoch))

    def depart(self, state: ProgramState, now_s: float) -> None:
        worker = self._worker_of(state)
        assert worker is not None, f"{state.program} leaves a GPU queue without a worker"
        if not self._clear_dram(worker, state, now_s):
            self.lose_copy(state, now_s)
            return
        self._place(state, Queue.CPU, now_s)
        self._out.append(cmd.SetLabel(state.program, worker.worker, Label.IDLE, state.epoch))
        self._out.append(cmd.Demote(state.program, worker.worker, state.epoch))

    def _clear_dram(self, worker: WorkerState, state: ProgramState, now_s: float) -> bool:
        """Make the CPU queue take the program, or leave it as it is and say False.

        Its programs whose gap has expired go to waiting first, then those idler than the newcomer.
        """
        cpu = worker.cpu.clone()
        chosen: list[ProgramState] = []
        for resident in self._idlest_in_dram(worker, now_s):
            if cpu.tokens + cpu.cost_tokens(state) <= worker.dram_tokens:
                break
            idler = self.rank(resident, now_s) > self.rank(state, now_s)
            if not resident.held and (idler or self._expired(resident, now_s)):
                chosen.append(resident)
                cpu.remove(resident.program)
        if cpu.tokens + cpu.cost_tokens(state) > worker.dram_tokens:
            return False
        for resident in chosen:
            self.lose_copy(resident, now_s)
        return True

    def _expired(self, state: ProgramState, now_s: float) -> bool:
        return state.ring.gap_age_s(now_s) >= self.settings.idle_expiry_s

    def _idlest_in_dram(self, worker: WorkerState, now_s: float) -> list[ProgramState]:
        """The CPU queue in the order in which it loses programs: held ones last, expired first."""
        return sorted(
            (self.programs[name] for name in worker.cpu),
            key=lambda s: (
                bool(s.held),
                not self._expired(s, now_s),
                -self.rank(s, now_s),
                s.sequence,
            ),
        )

    def trim_dram(self, worker: WorkerState, now_s: float) -> None:
        if worker.cpu.tokens <= worker.dram_tokens:
            return
        for state in self._idlest_in_dram(worker, now_s):
            self.lose_copy(state, now_s)
            if worker.cpu.tokens <= worker.dram_tokens:
                return

    def lose_copy(self, state: ProgramState, now_s: float) -> None:
        self._place(state, Queue.WAITING, now_s)
        if state.worker is not None:
            self._out.append(cmd.SetLabel(state.program, state.worker, Label.INACTIVE, state.epoch))


class Elapsed(Mori):
    """MORI's queues ranked by the age of the running gap alone: what a cleverer rank must beat."""

    name = "elapsed"

    def rank(self, state: ProgramState, now_s: float) -> float:
        return state.ring.gap_age_s(now_s)

    @property
    def margin(self) -> float:
        return self.settings.swap_margin_s
