"""The exceptions of kvtier.

    KvtierError
    ├── ConfigError        a setting, flag, variable or file of settings is wrong
    │   └── UnknownNameError   a name (policy, model, GPU, profile, ...) is not known
    ├── TraceError         a trace is missing, damaged beyond repair, or of no known format
    ├── CapacityError      what was asked does not fit into the memory there is
    ├── RejectedError      the scheduler refuses a request for good
    ├── WaitTimeoutError   pages were not there in the time that the caller gave
    ├── EventError         an event contradicts what the scheduler was told before
    ├── SimulationError    a simulated run cannot go on
    ├── CopyError          a copy of pages was asked for that cannot be made
    ├── PoolError          pages of a pool, or the memory behind it, were misused or are not there
    ├── TransferError      a transfer was asked for that cannot be made, or a job failed
    ├── TieringError       a request or a move is used against the order of its states
    └── TreeError          the radix tree was asked for what contradicts what it holds

Every message is one line that says what is wrong and what to do. The command line prints it and
exits with code 2.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher


class KvtierError(Exception):
    """Root of all errors that a caller or user can act on."""


class ConfigError(KvtierError):
    """A setting is unknown, of the wrong kind, or out of range."""


class UnknownNameError(ConfigError):
    """`name` is none of the `known` names of its `kind` ("policy", "model", "GPU", ...)."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        super().__init__(_unknown_message(kind, name, self.known))


class TraceError(KvtierError):
    """A trace cannot be read."""


class CapacityError(KvtierError):
    """A model, a program or a pool is larger than its memory."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, letter case aside; None when nothing is known."""
    lowered = name.lower()
    return max(
        known,
        key=lambda other: SequenceMatcher(None, lowered, other.lower()).ratio(),
        default=None,
    )


def _unknown_message(kind: str, name: str, known: tuple[str, ...]) -> str:
    closest = nearest(name, known)
    if closest is None:
        return f"unknown {kind} {name!r}: none is known here"
    return f"unknown {kind} {name!r}, did you mean {closest!r}? Known: {', '.join(known)}"


class EventError(KvtierError):
    """An event contradicts what the scheduler was told before; nothing was changed."""


class RejectedError(KvtierError):
    """The scheduler refuses a request; the message has its reason."""


class WaitTimeoutError(KvtierError, TimeoutError):
    """A wait took longer than its caller allows; what waited was cancelled."""


class SimulationError(KvtierError):
    """A simulated run cannot go on."""


class CopyError(KvtierError):
    """Page ids, tensors or a device do not fit a copy; nothing was copied."""


class PoolError(KvtierError):
    """Pages, or the memory behind them, are not as the caller says; nothing was changed."""


class TransferError(KvtierError):
    """Pages, jobs or a state do not fit a transfer and nothing was changed; or a job failed."""


class TreeError(KvtierError):
    """Tokens, pages or a state do not fit the radix tree; nothing was changed."""


class TieringError(KvtierError):
    """A lease or a move is used in a state that does not allow it; nothing was changed."""
