"""Carries out what the control channel asks, on the scheduler thread, between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, assert_never

from kvtier.ids import Label
from kvtier.integration.sglang.control import protocol
from kvtier.integration.sglang.control.inbox import Inbox
from kvtier.integration.sglang.control.protocol import Result, Status
from kvtier.integration.sglang.moves import Moves
from kvtier.integration.sglang.pins import Pins
from kvtier.integration.sglang.residency import levels, report
from kvtier.tree.programs import Program, Run

_ANSWERS_A_STEP = 8  # requests wait while the channel's questions are answered


class Worker:
    """The programs of one LabelledRadixCache and the commands about them."""

    def __init__(self, cache: Any, clock: Callable[[], float] = monotonic) -> None:
        self.inbox = Inbox()
        self.moves = Moves(cache)
        self.pins = Pins(cache)
        self.lost: deque[tuple[str, Run]] = deque()
        self._cache = cache
        self._clock = clock

    def tick(self) -> None:
        """Answer what waits and carry started moves on; never blocks."""
        self.inbox.drain(self.answer, _ANSWERS_A_STEP)
        self.moves.advance()
        self.pins.expire(self._clock())
        while self.lost:
            self._cache.programs.lost(*self.lost.popleft())

    def forget(self) -> None:
        """The tree was emptied."""
        self._cache.programs.forget_places()
        self.moves.forget()
        self.pins.forget()

    def answer(self, request: protocol.Request) -> protocol.Reply:
        """Carry out or look up what the request asks for."""
        match request:
            case protocol.Commands():
                return protocol.Results([self.execute(command) for command in request.commands])
            case protocol.ResidencyQuestion():
                return protocol.Residencies(self._report(request.program))
            case protocol.LevelsQuestion():
                return levels(self._cache)
            case _:
                assert_never(request)

    def execute(self, command: protocol.AnyCommand) -> Result:
        """Carry out one command, or refuse it with the reason and change nothing.

        A command that is not stale raises the program's epoch even when it is refused for another
        reason: whoever sent it has decided later than all lower epochs.
        """
        programs = self._cache.programs
        program = programs.find(command.program)
        if program is not None and command.epoch < program.epoch:
            return _refused(f"epoch {command.epoch} is stale, {program.epoch} was seen")
        if isinstance(command, protocol.SetLabel):
            if command.label is Label.BUSY:
                self.moves.stop(command.program)
            programs.relabel(command.program, command.label, command.epoch)
            return Result(Status.DONE)
        if program is None:
            return _refused(f"program {command.program!r} is unknown to this worker")
        program.epoch = command.epoch
        return self._move(command, program)

    def _move(
        self,
        command: protocol.Demote
        | protocol.Promote
        | protocol.Pin
        | protocol.Unpin
        | protocol.Release,
        program: Program,
    ) -> Result:
        match command:
            case protocol.Demote():
                return self._demote(program)
            case protocol.Promote():
                return self._promote(program)
            case protocol.Pin():
                refusal = self.pins.set(program, self._clock() + command.lifetime_s)
                if refusal:
                    return _refused(refusal)
                self.moves.stop(program.name)
                return Result(Status.DONE)
            case protocol.Unpin():
                ended = self.pins.end(program.name)
                return Result(Status.DONE, "" if ended else "the program was not pinned")
            case protocol.Release():
                self._release(program)
                return Result(Status.DONE)
            case _:
                assert_never(command)

    def _demote(self, program: Program) -> Result:
        if program.runs:
            return _refused(f"the program runs: {len(program.runs)} in the engine")
        if program.name in self.pins:
            return _refused("the program is pinned; unpin it first")
        return self.moves.demote(program)

    def _promote(self, program: Program) -> Result:
        with self.pins.firm():
            result = self.moves.promote(program)
        if result.status is not Status.REFUSED:
            self.moves.stop(program.name)
            self.pins.follow(program)
        return result

    def _release(self, program: Program) -> None:
        self.moves.stop(program.name)
        self.pins.end(program.name)
        self._cache.programs.release(program)

    def _report(self, name: str | None) -> list[protocol.Residency]:
        programs = self._cache.programs
        one = programs.find(name) if name is not None else None
        chosen = list(programs) if name is None else [] if one is None else [one]
        page_size = self._cache.page_size
        return [report(program, program.name in self.pins, page_size) for program in chosen]


def _refused(reason: str) -> Result:
    return Result(Status.REFUSED, reason)
