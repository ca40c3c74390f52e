"""Pins: programs whose pages stay in HBM, each for a time, all within a share of it.

A pin gives way where a request could not run otherwise: to SGLang its pages count as evictable, so
that requests are admitted as ever, and pins end, the one with the least time left first, when
nothing else is left to evict.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvtier.tree.holders import Node
from kvtier.tree.programs import Program

_LOG = logging.getLogger(__name__)
_HBM_SHARE = 0.5
"""Pins may hold this much of HBM: running requests need the rest."""


@dataclass(eq=False)
class _Pin:
    program: Program
    until_s: float
    nodes: list[int]
    tokens: int


class Pins:
    """Locks of pinned programs on SGLang's tree; times are the scheduler's clock in seconds."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._pins: dict[str, _Pin] = {}
        self._firm = False

    def __contains__(self, program: str) -> bool:
        return program in self._pins

    def set(self, program: Program, until_s: float) -> str:
        """Pin the program until `until_s`; returns why not, "" where it is pinned."""
        ends, tokens = _ends_in_hbm(program)
        if not ends:
            return "nothing of the program is in HBM"
        refusal = self._refusal(program.name, tokens)
        if refusal:
            return refusal
        self._lock(_Pin(program, until_s, [node.id for node in ends], tokens))
        return ""

    def follow(self, program: Program) -> None:
        """The program's prompts moved on: pin what it has now, where the share allows."""
        pin = self._pins.get(program.name)
        if pin is None:
            return
        ends, tokens = _ends_in_hbm(program)
        if ends and not self._refusal(program.name, tokens):
            self._lock(_Pin(program, pin.until_s, [node.id for node in ends], tokens))

    def end(self, program: str) -> bool:
        """End the program's pin; False where there is none."""
        pin = self._pins.pop(program, None)
        if pin is not None:
            for node in pin.nodes:
                self._cache.tree_core.dec_full_pin(node)
        return pin is not None

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over."""
        for pin in [pin for pin in self._pins.values() if pin.until_s <= now_s]:
            self.end(pin.program.name)

    def yieldable_tokens(self) -> int:
        """Tokens of HBM that nothing but pins keeps from eviction."""
        times: Counter[Node] = Counter()
        for pin in self._pins.values():
            for end in pin.nodes:
                node = self._cache.tree_core.node_by_id(end)
                while node.parent is not None:
                    times[node] += 1
                    node = node.parent
        return sum(len(n.key) for n, count in times.items() if _num_locks(n) == count)

    def give_way(self, num_tokens: int) -> None:
        """End pins until so many tokens are evictable, or none is left."""
        if self._firm:
            return
        for pin in sorted(self._pins.values(), key=lambda pin: pin.until_s):
            if self._cache.tree_core.evictable_size() >= num_tokens:
                return
            _LOG.info("kvtier: the pin of %r gives way to a request", pin.program.name)
            self.end(pin.program.name)

    @contextmanager
    def firm(self) -> Iterator[None]:
        """Pins give way to requests, not to what the block does."""
        self._firm = True
        try:
            yield
        finally:
            self._firm = False

    def forget(self) -> None:
        """The tree was emptied, and its locks with it."""
        self._pins.clear()

    def _lock(self, pin: _Pin) -> None:
        """Lock the new ends before the old ones are unlocked: in between, nothing is evictable."""
        for node in pin.nodes:
            self._cache.tree_core.inc_full_pin(node)
        self.end(pin.program.name)
        self._pins[pin.program.name] = pin

    def _refusal(self, program: str, tokens: int) -> str:
        others = sum(pin.tokens for name, pin in self._pins.items() if name != program)
        budget = int(_HBM_SHARE * self._cache.token_to_kv_pool_allocator.size)
        if others + tokens <= budget:
            return ""
        return f"pins may hold {budget} tokens of HBM, others have {others} and it has {tokens}"


def _num_locks(node: Node) -> int:
    locks: int = node.component_data[ComponentType.FULL].lock_ref
    return locks


def _ends_in_hbm(program: Program) -> tuple[list[Node], int]:
    """The last node in HBM of each of the program's prompts, and the tokens up to the root."""
    ends: dict[Node, None] = {}
    tokens = 0
    for anchor in program.anchors():
        node = anchor.node
        while node is not None and node.parent is not None and node.evicted:
            node = node.parent
        if node is not None and node.parent is not None:
            ends[node] = None
    seen: set[int] = set()
    for end in ends:
        node = end
        while node.parent is not None and node.id not in seen:
            seen.add(node.id)
            tokens += len(node.key)
            node = node.parent
    return list(ends), tokens
