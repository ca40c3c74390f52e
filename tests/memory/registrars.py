"""A registrar that keeps to a driver's rules and can be told to fail."""

from __future__ import annotations


class FakeRegistrar:
    """Refuses what a driver refuses; fails the calls of those numbers, counted from 0."""

    def __init__(
        self,
        *,
        fail_register: frozenset[int] = frozenset(),
        fail_unregister: frozenset[int] = frozenset(),
    ) -> None:
        self.live: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.undone: list[int] = []
        self._fail_register = fail_register
        self._fail_unregister = fail_unregister

    def register(self, address: int, num_bytes: int) -> None:
        self.calls.append((address, num_bytes))
        if num_bytes >= 512 << 30:
            raise RuntimeError("error 2: out of memory")
        if any(a < address + num_bytes and address < a + n for a, n in self.live.items()):
            raise RuntimeError("error 712: already registered")
        if len(self.calls) - 1 in self._fail_register:
            raise RuntimeError("error 2: out of memory")
        self.live[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.undone.append(address)
        if len(self.undone) - 1 in self._fail_unregister:
            raise RuntimeError("error 713: not registered")
        del self.live[address]
