"""One worker's scheduler and tier manager, wired together. Sans-IO: the clock is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import CapacityError, KvtierError, RejectedError, TieringError
from kvtier.ids import Direction, Label
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.scheduling.scheduler import Scheduler
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tree.keys import Namespace, Tokens
from kvtier.tree.node import Tier

_WORKER = "local"


class Stage(StrEnum):
    """HELD by the scheduler, QUEUED for pages or loading, RUNNING, ENDED."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Request:
    """One inference. `on_start(error)` runs once: None when its pages are there, else why not."""

    request: str
    program: str
    tokens: Tokens
    num_pages: int
    namespace: Namespace
    on_start: Callable[[KvtierError | None], None]
    stage: Stage = Stage.HELD
    lease: Lease | None = None


class LocalWorker:
    """Requests in; places in HBM by the scheduler's and the manager's leave.

    Every method that takes `now_s` (seconds, never going back) carries out what the scheduler
    commands, before it returns. One thread at a time.
    """

    def __init__(self, scheduler: Scheduler, manager: TierManager) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.page_size = manager.tree.page_size
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.num_refused_moves = 0
        self._requests: dict[str, Request] = {}
        self._queue: deque[Request] = deque()
        self._opening = False
        self._now_s = float("-inf")
        self._handlers: dict[type, Callable[..., None]] = {
            cmd.Forward: self._forward,
            cmd.Hold: lambda command: None,
            cmd.Reject: self._reject,
            cmd.Demote: self._demote,
            # It comes with the request that it is for, which loads.
            cmd.Promote: lambda command: None,
            cmd.Drop: lambda command: self.manager.release(command.program),
            cmd.SetLabel: self._set_label,
            cmd.Route: lambda command: None,
        }

    def start(self, now_s: float) -> None:
        """Tell the scheduler of this worker's tiers."""
        hbm, dram = (self.manager.pools[tier].num_pages * self.page_size for tier in Tier)
        self._tell(ev.WorkerUp(_WORKER, hbm, dram if self.manager.mode.offload else 0), now_s)

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended, in the order in which they came."""
        return list(self._requests.values())

    # --- programs ---

    def program(self, program: str, parent: str | None, now_s: float) -> None:
        """A program exists; a sub-agent of `parent` is released with it."""
        self._tell(ev.ProgramArrived(program, parent), now_s)
        if parent is not None:
            self.manager.tree.adopt(program, parent)

    def tool_called(self, program: str, name: str, now_s: float) -> None:
        """The program waits for this tool."""
        self._tell(ev.ToolCalled(program, name), now_s)

    def release(self, program: str, now_s: float) -> None:
        """The program has ended. Raises TieringError while one of its requests is live."""
        live = [r.request for r in self._requests.values() if r.program == program]
        if live:
            raise TieringError(f"program {program!r} still runs {live[0]}; finish or cancel it")
        self._tell(ev.ProgramReleased(program), now_s)

    def demote(self, program: str, on_end: Callable[[bool], None]) -> None:
        """Copy down what only HBM has of the program, which is IDLE now; `on_end(well)` runs."""
        self.manager.relabel(program, Label.IDLE)
        answer = self.manager.demote(program, on_end)
        if isinstance(answer, bool):
            on_end(answer)

    def prefetch(self, program: str, on_end: Callable[[bool], None]) -> None:
        """Bring up the program's last prompts; `on_end(well)` runs, maybe now."""
        if not self.manager.promote(program, on_end):
            on_end(False)

    # --- requests ---

    def arrive(self, request: Request, now_s: float) -> None:
        """A prompt asks to run; `request.on_start` tells when it may, maybe at once.

        Raises CapacityError, with nothing changed, for more pages than HBM has.
        """
        most = self.manager.pools[Tier.HBM].num_pages
        if request.num_pages > most:
            raise CapacityError(
                f"{request.num_pages} pages were asked for and HBM has {most}; shorten the prompt, "
                "or give the runtime more"
            )
        self._requests[request.request] = request
        event = ev.RequestArrived(request.program, request.request, request.tokens.size)
        try:
            self._tell(event, now_s)
        except BaseException:
            self._requests.pop(request.request, None)
            raise

    def extend(
        self, request: Request, num_tokens: int, num_pages: int, on_room: Callable[[], None]
    ) -> bool:
        """`num_tokens` more of output, and `num_pages` more: True now, False once `on_room` runs.

        Raises CapacityError, with nothing changed, where running requests hold all of HBM.
        """
        lease = self._running(request)
        now = True
        if num_pages:
            answer = self.manager.extend(lease, num_pages, on_room)
            if answer is None:
                raise CapacityError(
                    f"{num_pages} more pages for {request.request}, and running requests hold HBM; "
                    "finish or cancel one, or run fewer (admission)"
                )
            now = answer
        if num_tokens:
            event = ev.TokensProduced(request.program, request.request, num_tokens)
            self._tell(event, self._now_s)
        return now

    def publish(self, request: Request, tokens: Tokens) -> None:
        """The KV of `tokens` is in the request's pages; whole pages of it serve others from now."""
        self.manager.publish(self._running(request), tokens)

    def finish(self, request: Request, tokens: Tokens, now_s: float) -> None:
        """The request has ended, and the KV of `tokens` is computed."""
        self.publish(request, tokens)
        self._close(request, well=True)
        event = ev.RequestFinished(request.program, request.request, max(tokens.size, 1))
        self._tell(event, now_s)
        self._open_queued()

    def cancel(self, request: Request, now_s: float, error: KvtierError) -> None:
        """End the request in whatever stage it is; what it published stays. Twice is fine.

        Where its pages were not there yet, `on_start` is given the error.
        """
        if self._requests.get(request.request) is not request:
            return  # it has ended, or never began
        if request in self._queue:
            self._queue.remove(request)
        if request.stage is not Stage.RUNNING:
            request.on_start(error)
        self._close(request, well=False)
        self._tell(ev.RequestCancelled(request.program, request.request), now_s)
        self._open_queued()

    # --- what happens beside them ---

    def moved(self, move: Move, now_s: float, *, well: bool) -> None:
        """A move has ended."""
        self._now_s = max(self._now_s, now_s)
        self.manager.ended(move, well=well)
        self._open_queued()

    def tick(self, now_s: float) -> None:
        """The scheduler's period has passed: report what is where, and let it think."""
        locked = self.manager.pools[Tier.HBM].num_pages - self.manager.room.available
        capacity = self.manager.pools[Tier.HBM].num_pages * self.page_size
        stats = ev.EngineStats(
            _WORKER,
            locked * self.page_size,
            capacity,
            self.prompt_tokens,
            self.cached_tokens,
        )
        self._tell(stats, now_s)
        if self.manager.mode.labels:
            self._report_residency(now_s)
        self._tell(ev.Tick(), now_s)

    def _report_residency(self, now_s: float) -> None:
        busy = {request.program for request in self._requests.values()}
        for name, state in list(self.scheduler.programs.items()):
            if state.worker is not None and name not in busy:
                hbm, kept = (pages * self.page_size for pages in self.manager.kept(name))
                self._tell(ev.Residency(name, state.epoch, hbm, kept - hbm), now_s)

    # --- commands ---

    def _tell(self, event: ev.Event, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        for command in self.scheduler.handle(event, now_s):
            self._handlers[type(command)](command)

    def _forward(self, command: cmd.Forward) -> None:
        request = self._requests[command.request]
        request.stage = Stage.QUEUED
        self._tell(ev.RequestForwarded(command.program, command.request), self._now_s)
        self._queue.append(request)
        self._open_queued()

    def _reject(self, command: cmd.Reject) -> None:
        request = self._requests.pop(command.request)
        request.stage = Stage.ENDED
        request.on_start(RejectedError(f"request {command.request}: {command.reason}"))

    def _set_label(self, command: cmd.SetLabel) -> None:
        self.manager.relabel(command.program, command.label)

    def _demote(self, command: cmd.Demote) -> None:
        def ended(well: bool) -> None:
            event: ev.Event = ev.TransferFailed(command.program, command.epoch, Direction.D2H)
            if well:
                tokens = self.manager.kept(command.program).pages * self.page_size
                event = ev.TransferFinished(command.program, command.epoch, Direction.D2H, tokens)
            self._tell(event, self._now_s)

        answer = self.manager.demote(command.program, ended)
        if answer is True:
            ended(True)
        elif answer is False:
            self.num_refused_moves += 1
            reason = "nothing of it can be copied, or DRAM has no room"
            self._tell(ev.CommandRefused(command.program, command.epoch, reason), self._now_s)

    # --- pages ---

    def _open_queued(self) -> None:
        """Give queued requests their pages, first come first served."""
        if self._opening:
            return  # a callback of the loop below freed more: the loop sees it
        self._opening = True
        try:
            while self._queue and self._open(self._queue[0]):
                self._queue.popleft()
        finally:
            self._opening = False

    def _open(self, request: Request) -> bool:
        """False where it has to wait for running requests."""
        lease = self.manager.open(
            request.tokens,
            num_pages=request.num_pages,
            request=request.request,
            program=request.program,
            namespace=request.namespace,
            on_ready=lambda lease: self._ready(request, lease),
        )
        if lease is None:
            return False
        request.lease = lease
        self.prompt_tokens += request.tokens.size
        self.cached_tokens += (lease.hbm_pages + lease.dram_pages) * self.page_size
        if lease.state is LeaseState.READY:
            self._ready(request, lease)
        return True

    def _ready(self, request: Request, lease: Lease) -> None:
        if lease.state is LeaseState.READY:
            request.stage = Stage.RUNNING
            request.on_start(None)
            return
        error = CapacityError(
            f"request {request.request}: its load failed, and running requests hold the room to "
            "compute it; ask again"
        )
        self.cancel(request, self._now_s, error)

    def _running(self, request: Request) -> Lease:
        if request.stage is not Stage.RUNNING or request.lease is None:
            raise TieringError(f"request {request.request} is {request.stage}, not running")
        return request.lease

    def _close(self, request: Request, *, well: bool) -> None:
        lease, request.lease, request.stage = request.lease, None, Stage.ENDED
        del self._requests[request.request]
        if lease is not None:
            self.manager.close(lease, well=well)
