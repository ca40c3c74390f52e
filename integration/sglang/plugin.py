"""Entry point of group `sglang.srt.plugins`: SGLang calls `activate` once in each process.

It stays light: it runs in every SGLang process of every user who has kvtier installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvtier.errors import ConfigError

BACKEND = "kvtier"
_FLAG = "--radix-cache-backend"
_SWITCH = "KVTIER_SGLANG"


def activate() -> None:
    """Offer the radix-cache backend "kvtier" where it was asked for; else change nothing.

    Ends the process with one line where this SGLang cannot work with kvtier: SGLang would log an
    exception and go on without.
    """
    if not asked_for(sys.argv, os.environ):
        return
    from kvtier.integration.sglang.guard import check_version
    from kvtier.integration.sglang.settings import control_of

    try:
        check_version()
        control_of(os.environ)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    os.environ[_SWITCH] = "1"  # processes that SGLang spawns do not see the flag
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
    )

    from kvtier.integration.sglang.factory import build_cache

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, build_cache)


def asked_for(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the command line selects the backend or KVTIER_SGLANG=1 is set."""
    value = environment.get(_SWITCH, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{_SWITCH}={value!r}; set it to 1 or leave it unset")
    pairs = pairwise([*arguments, ""])
    flagged = any(a == f"{_FLAG}={BACKEND}" or (a == _FLAG and b == BACKEND) for a, b in pairs)
    return flagged or value == "1"
