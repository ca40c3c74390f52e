"""What the scheduler asks for. Records only: whoever drives the scheduler carries them out."""

from __future__ import annotations

import msgspec

from kvtier.ids import Label


class Forward(msgspec.Struct, frozen=True):
    """Hand the request to this worker at once."""

    program: str
    request: str
    worker: str


class Hold(msgspec.Struct, frozen=True):
    """Keep the request in the gateway; a later Forward or Reject ends the wait."""

    program: str
    request: str
    reason: str


class Reject(msgspec.Struct, frozen=True):
    """The request ends here; `reason` is for its client."""

    program: str
    request: str
    reason: str


class Demote(msgspec.Struct, frozen=True):
    """Copy the program's KV to the worker's DRAM, then free it in HBM."""

    program: str
    worker: str
    epoch: int


class Promote(msgspec.Struct, frozen=True):
    """Copy the program's KV from the worker's DRAM up to its HBM."""

    program: str
    worker: str
    epoch: int


class Drop(msgspec.Struct, frozen=True):
    """Free the program's KV on this worker, in both tiers, without a copy."""

    program: str
    worker: str
    epoch: int


class SetLabel(msgspec.Struct, frozen=True):
    """Relabel the program's pages on this worker."""

    program: str
    worker: str
    label: Label
    epoch: int


class Route(msgspec.Struct, frozen=True):
    """The program's next requests go to this worker."""

    program: str
    worker: str


Command = Forward | Hold | Reject | Demote | Promote | Drop | SetLabel | Route
