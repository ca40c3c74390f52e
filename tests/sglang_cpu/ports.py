"""TCP ports for servers that bind them later, never the same for two at a time."""

from __future__ import annotations

import random
import socket
from types import TracebackType

# Below the kernel's ephemeral ports, and below those that SGLang picks for itself (22000 and up).
_CANDIDATES = range(20_000, 22_000)


class ReservedPort:
    """A free port of 127.0.0.1 that no other ReservedPort on this machine has until it is closed.

    The claim is an abstract Unix socket, which the kernel takes back when the process ends. Raises
    OSError where all ports are taken.
    """

    def __init__(self) -> None:
        for number in random.sample(_CANDIDATES, len(_CANDIDATES)):
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0kvtier-tests-port-{number}")
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", number))
            except OSError:
                claim.close()
                continue
            self.number = number
            self._claim = claim
            return
        raise OSError(f"no free port in {_CANDIDATES.start}-{_CANDIDATES.stop - 1}")

    def close(self) -> None:
        """Give the port to others. Again is harmless."""
        self._claim.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
