"""What the scheduler is told. One frozen record per event; times travel beside them.

Tokens are KV tokens of a program's context; `epoch` is the program's move counter, and a report
that carries an older epoch than the program's is about a place it has already left.
"""

from __future__ import annotations

import msgspec

from kvtier.ids import Direction


class WorkerUp(msgspec.Struct, frozen=True):
    """A worker can take programs. Capacities are KV tokens of its HBM and DRAM pools."""

    worker: str
    hbm_tokens: int
    dram_tokens: int = 0


class WorkerDown(msgspec.Struct, frozen=True):
    """A worker is gone, and with it all KV it held. Its requests end by events of their own."""

    worker: str


class ProgramArrived(msgspec.Struct, frozen=True):
    """A program exists. Optional: an unknown program in RequestArrived arrives by itself."""

    program: str
    parent: str | None = None
    shared_group: str | None = None
    shared_tokens: int = 0


class RequestArrived(msgspec.Struct, frozen=True):
    """One model call asks to run. `context_tokens` counts its whole prompt (estimated or exact)."""

    program: str
    request: str
    context_tokens: int


class RequestForwarded(msgspec.Struct, frozen=True):
    """The request has been handed to the worker; reasoning time starts here."""

    program: str
    request: str


class TokensProduced(msgspec.Struct, frozen=True):
    """`num_tokens` more output tokens of a running request."""

    program: str
    request: str
    num_tokens: int


class ToolCalled(msgspec.Struct, frozen=True):
    """The program waits for this tool; sent with or after RequestFinished."""

    program: str
    name: str


class RequestFinished(msgspec.Struct, frozen=True):
    """The model call ended; `context_tokens` is prompt plus output, exact."""

    program: str
    request: str
    context_tokens: int


class RequestCancelled(msgspec.Struct, frozen=True):
    """The client left or the worker failed: the request ends here, held or running."""

    program: str
    request: str


class ProgramReleased(msgspec.Struct, frozen=True):
    """The program ended: whatever it holds is given back."""

    program: str


class Residency(msgspec.Struct, frozen=True):
    """What a worker holds of a program, in tokens. Overwrites the scheduler's own sums.

    `hbm_private_tokens` of its private prefix are in HBM; `dram_private_tokens` extend them from
    DRAM. Duplicates count once.
    """

    program: str
    epoch: int
    hbm_private_tokens: int
    dram_private_tokens: int
    shared_group: str | None = None
    shared_tokens: int = 0


class TransferFinished(msgspec.Struct, frozen=True):
    """A commanded copy is complete."""

    program: str
    epoch: int
    direction: Direction
    num_tokens: int


class TransferFailed(msgspec.Struct, frozen=True):
    """A commanded copy failed and published nothing."""

    program: str
    epoch: int
    direction: Direction


class CommandRefused(msgspec.Struct, frozen=True):
    """The worker did not carry out the program's last move."""

    program: str
    epoch: int
    reason: str


class EngineStats(msgspec.Struct, frozen=True):
    """A worker's own counters.

    `locked_tokens` is KV locked by running requests (SGLang's token usage counts the same);
    `prompt_tokens` and `cached_tokens` are totals since the worker's start.
    """

    worker: str
    locked_tokens: int
    capacity_tokens: int
    prompt_tokens: int
    cached_tokens: int


class Tick(msgspec.Struct, frozen=True):
    """The scheduler's period has passed."""


Event = (
    WorkerUp
    | WorkerDown
    | ProgramArrived
    | RequestArrived
    | RequestForwarded
    | TokensProduced
    | ToolCalled
    | RequestFinished
    | RequestCancelled
    | ProgramReleased
    | Residency
    | TransferFinished
    | TransferFailed
    | CommandRefused
    | EngineStats
    | Tick
)
