"""What the environment tells the plug-in: SGLang's own flags cannot be extended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvtier.errors import ConfigError

CONTROL = "KVTIER_CONTROL"
TOKEN = "KVTIER_CONTROL_TOKEN"


class Control(NamedTuple):
    """Where the control channel listens and what its clients must know."""

    address: str
    token: str


def control_of(environment: Mapping[str, str]) -> Control | None:
    """The control channel that is asked for; None without one.

    Raises ConfigError where an address is set without a token, or a token without an address.
    """
    address, token = environment.get(CONTROL, ""), environment.get(TOKEN, "")
    if address and not token:
        raise ConfigError(
            f"{CONTROL} is set without {TOKEN}; set both: only who knows it may command"
        )
    if token and not address:
        raise ConfigError(f"{TOKEN} is set without {CONTROL}; set both, or neither for no channel")
    return Control(address, token) if address else None
