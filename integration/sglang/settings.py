"""What the environment tells the plug-in: SGLang's own flags cannot be extended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address, check_token

CONTROL = "KVTIER_CONTROL"
TOKEN = "KVTIER_CONTROL_TOKEN"


class Control(NamedTuple):
    """Where the control channel listens and what its clients must know."""

    address: Address
    token: str


def control_of(environment: Mapping[str, str]) -> Control | None:
    """The control channel that is asked for; None without one.

    Raises ConfigError where one of address and token is missing or cannot be used.
    """
    address, token = environment.get(CONTROL, ""), environment.get(TOKEN, "")
    if address and not token:
        raise ConfigError(
            f"{CONTROL} is set without {TOKEN}; set both: only who knows it may command"
        )
    if token and not address:
        raise ConfigError(f"{TOKEN} is set without {CONTROL}; set both, or neither for no channel")
    return Control(Address.parse(address), check_token(token)) if address else None
