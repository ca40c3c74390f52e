"""A window of a fixed size: no law, or none at all."""

from __future__ import annotations

from kvtier.errors import ConfigError


class FixedWindow:
    """At most `size_bytes` in flight; without bound if not given. A `Window`."""

    def __init__(self, size_bytes: int = 1 << 62) -> None:
        if size_bytes < 1:
            raise ConfigError(f"transfer window: size_bytes={size_bytes}; use >= 1")
        self.size_bytes = size_bytes

    def room(self, in_flight_bytes: int) -> int:
        return max(self.size_bytes - in_flight_bytes, 0)

    def sent(self, num_bytes: int, now_s: float) -> None:
        """Nothing to learn."""

    def ended(self, num_bytes: int, sent_s: float, now_s: float) -> None:
        """Nothing to learn."""
