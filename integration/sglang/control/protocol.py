"""What travels over the control channel: commands, questions and their answers, as JSON.

Token counts are tokens of KV. An epoch is a whole number that the sender raises with every decision
about a program; a command with a lower one than the worker has seen is refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from kvtier.ids import Label

ProgramId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Command(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Root of the commands; in JSON, `type` is the tag of the class."""

    program: ProgramId
    epoch: Epoch


class SetLabel(Command, frozen=True, tag="set_label"):
    """Relabel the program's pages; no request is needed."""

    label: Label


class Demote(Command, frozen=True, tag="demote"):
    """Copy what the program alone holds in HBM to DRAM, then free it in HBM."""


class Promote(Command, frozen=True, tag="promote"):
    """Copy what the program has in DRAM alone back into HBM, evicting others for it."""


class Pin(Command, frozen=True, tag="pin"):
    """Keep the program's pages in HBM from eviction, for so long or until unpin or release.

    Pages that it computes meanwhile are kept too. A further pin sets the time anew.
    """

    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class Unpin(Command, frozen=True, tag="unpin"):
    """End a pin."""


class Release(Command, frozen=True, tag="release"):
    """Forget the program: its pages become INACTIVE, its pin ends, its epoch stays known."""


AnyCommand = SetLabel | Demote | Promote | Pin | Unpin | Release


class Status(StrEnum):
    """What became of a command."""

    DONE = "done"
    STARTED = "started"  # a copy is under way; Residency shows when it has ended
    REFUSED = "refused"  # nothing was changed; the reason says why


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to one command. `tokens` is how many a copy moves, 0 where nothing is copied."""

    status: Status
    reason: str = ""
    tokens: int = 0


class Residency(msgspec.Struct, frozen=True):
    """Where the pages of one program's last prompts are, in tokens.

    `hbm_private` and `dram_private` count pages that only this program holds; a page in both tiers
    counts in both. `shared_tokens` are held by other programs too, in either tier, and
    `shared_group` names their common beginning ("" where nothing is shared).
    """

    program: str
    epoch: int
    label: Label
    hbm_private: int
    dram_private: int
    shared_group: str
    shared_tokens: int
    pinned: bool
    running: int  # requests of the program that the engine has now


class TierLevel(msgspec.Struct, frozen=True):
    """Tokens of one tier: free + evictable + protected + in_flight = capacity."""

    capacity: int
    free: int
    evictable: int
    protected: int
    in_flight: int


class Levels(msgspec.Struct, frozen=True):
    """Fill of both pools and the bytes of one token over all layers."""

    hbm: TierLevel
    dram: TierLevel
    bytes_per_token: int


class Commands(msgspec.Struct, frozen=True, tag="commands", forbid_unknown_fields=True):
    """Body of `POST /v1/commands`; carried out in order, each with its own result."""

    commands: Annotated[list[AnyCommand], msgspec.Meta(min_length=1, max_length=1024)]


class ResidencyQuestion(msgspec.Struct, frozen=True):
    """One program, or all (None)."""

    program: str | None = None


class LevelsQuestion(msgspec.Struct, frozen=True):
    """How full the pools are."""


Request = Commands | ResidencyQuestion | LevelsQuestion


class Results(msgspec.Struct, frozen=True):
    """Answer to `POST /v1/commands`, in the order of the commands."""

    results: list[Result]


class Residencies(msgspec.Struct, frozen=True):
    """Answer to `GET /v1/residency`; an unknown program gives an empty list."""

    programs: list[Residency]


Reply = Results | Residencies | Levels
