"""The laws of design section 9 that a scheduler can break, checked from outside.

`world` is an `Environment`: its books against the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.scheduling import commands as cmd
from kvtier.scheduling.state import Queue

if TYPE_CHECKING:
    from .environment import Environment, Program

LABEL_OF = {Queue.GPU: cmd.Label.BUSY, Queue.CPU: cmd.Label.IDLE}


def total_tokens(programs: Iterable[Program]) -> int:
    """Private tokens, plus the largest shared head per group."""
    programs = list(programs)
    heads: dict[str, int] = {}
    for program in programs:
        if program.group is not None:
            heads[program.group] = max(heads.get(program.group, 0), program.head_tokens)
    return sum(p.tokens - p.head_tokens for p in programs) + sum(heads.values())


# One command -------------------------------------------------------------------------------


def check_command(world: Environment, command: cmd.Command) -> None:
    """What must hold at the moment a command is given."""
    if isinstance(command, cmd.Forward | cmd.Hold | cmd.Reject):
        assert command.request in world.requests, f"{command} of a request that has ended"
    match command:
        case cmd.Forward():
            _check_forward(world, command)
        case cmd.Hold(request=request):
            assert world.requests[request].stage == "asked", f"{command}: held already"
        case cmd.Reject(request=request):
            stage = world.requests[request].stage
            assert stage in ("asked", "held"), f"{command}, but it is {stage}"
            assert command.reason
        case cmd.Route(worker=worker):
            assert worker in world.scheduler.workers, f"{command}: that worker is down"
        case _:
            _check_move(world, command)


def _check_forward(world: Environment, command: cmd.Forward) -> None:
    request, program = world.requests[command.request], world.programs[command.program]
    assert request.program == command.program
    assert request.stage in ("asked", "held"), f"{command}, but it is {request.stage}"
    assert command.worker in world.scheduler.workers, f"{command}: that worker is down"
    assert program.route == command.worker, f"{command}, but routed to {program.route}"
    alone = all(r.program != command.program for r in world.running())
    hbm_tokens = world.capacities[command.worker][0]
    assert not alone or program.tokens <= hbm_tokens, f"{command}: {program.tokens} tokens"
    if world.tiered:
        label = (program.label, program.label_worker)
        assert label == (cmd.Label.BUSY, command.worker), f"{command} from outside: {label}"


def _check_move(
    world: Environment, command: cmd.SetLabel | cmd.Demote | cmd.Promote | cmd.Drop
) -> None:
    program = world.programs[command.program]
    assert command.worker in world.scheduler.workers, f"{command}: that worker is down"
    same_event = program.epoch_step == len(world.log)
    assert command.epoch >= program.epoch + (not same_event), f"{command} after {program.epoch}"
    match command:
        case cmd.SetLabel(label=cmd.Label.BUSY, worker=worker):
            home = program.copy_on
            assert home in (None, worker), f"{command} leaves its copy on {home} behind"
        case cmd.SetLabel(label=cmd.Label.IDLE, worker=worker):
            label = (program.label, program.label_worker)
            assert label == (cmd.Label.BUSY, worker), f"{command}, but it was {label}"
        case cmd.Demote():
            assert program.label is cmd.Label.IDLE, f"{command} of a {program.label} program"
        case cmd.Promote():
            assert program.label is cmd.Label.BUSY, f"{command} of a {program.label} program"
            assert program.came_up, f"{command} of a program without a copy"
    if not world.tiered:
        assert isinstance(command, cmd.Drop), f"{command} from a policy without tiers"


# After every event -------------------------------------------------------------------------


def check_after_event(world: Environment) -> None:
    world.scheduler.check_integrity()
    _check_requests(world)
    _check_running(world)
    _check_sums(world)
    if world.tiered:
        _check_labels(world)


def _check_requests(world: Environment) -> None:
    """Law 5: the scheduler holds and runs exactly what has not ended."""
    states = world.scheduler.programs
    silent = [r for r in world.requests.values() if r.stage == "asked"]
    assert not silent, f"neither held, forwarded nor rejected: {silent}"
    held = {(name, request) for name, s in states.items() for request in s.held}
    assert held == {(r.program, r.request) for r in world.held()}
    running = {(name, request) for name, s in states.items() for request in s.running}
    assert running == {(r.program, r.request) for r in world.running()}
    busy = {r.program for r in world.requests.values()}
    gone = [n for n, p in world.programs.items() if p.released and n not in busy]
    assert not gone, f"released, ended, and still known: {gone}"


def _check_running(world: Environment) -> None:
    for name, worker in world.scheduler.workers.items():
        num_running = sum(r.worker == name for r in world.healthy())
        assert worker.num_running_requests == num_running
        assert num_running <= world.scheduler.admission.request_window(name)


def _check_sums(world: Environment) -> None:
    """Law 8: every sum equals the one taken from the books, and none is negative."""
    for worker in world.scheduler.workers.values():
        for ledger in (worker.staying, worker.leaving):
            expected = total_tokens(world.programs[name] for name in ledger)
            assert ledger.tokens == expected, f"{worker.worker}: {ledger.tokens}, not {expected}"
        copies = [world.programs[name] for name in worker.cpu]
        assert worker.cpu.tokens >= 0
        if not any(program.resized for program in copies):
            assert worker.cpu.tokens == total_tokens(copies)


def _check_labels(world: Environment) -> None:
    for name, state in world.scheduler.programs.items():
        program = world.programs[name]
        if state.queue is Queue.WAITING:
            assert program.label in (None, cmd.Label.INACTIVE), f"{name}: {program.label}, waiting"
            continue
        label = (program.label, program.label_worker)
        assert label == (LABEL_OF[state.queue], state.worker), f"{name}: {label}, {state.queue}"


# After every tick --------------------------------------------------------------------------


def check_after_tick(world: Environment) -> None:
    """Law 9, and the agent window."""
    for name, worker in world.scheduler.workers.items():
        hbm_tokens, dram_tokens = world.capacities[name]
        window = world.scheduler.admission.program_window(name)
        assert len(worker.staying) <= window, f"{name}: {len(worker.staying)} of {window} programs"
        if world.tiered:
            staying = total_tokens(world.programs[p] for p in worker.staying)
            assert staying <= hbm_tokens, f"{name}: {staying} tokens stay in {hbm_tokens} of HBM"
            kept = worker.cpu.tokens
            assert kept <= dram_tokens, f"{name}: {kept} tokens kept in {dram_tokens} of DRAM"
