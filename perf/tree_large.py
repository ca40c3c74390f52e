"""Calls on a tree of 10^6 pages that 10^4 programs hold: microseconds, the tail included.

    python -m perf.tree_large [--json FILE] [--pages 1000000] [--programs 10000] [--rounds 10000]

Programs in groups of a hundred share the first tenth of their prompt. Half of them are IDLE and
have a copy in DRAM. A round matches a prompt, relabels a program and evicts 512 pages of each tier;
what left is then computed, loaded or copied down again, untimed, so that the tree keeps its size.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.ids import Label
from kvtier.tree.node import Node, State, Tier, path_to
from kvtier.tree.tree import RadixTree
from perf import json_lines
from perf.cpu_copy import commit
from perf.simulator import environment

_PAGE = 16
_GROUP = 100
_EVICTED = 512
_MOST_P99_US = 1000.0


class Large:
    """The tree, its programs' prompts, and what each timed call took, ns."""

    def __init__(self, num_pages: int, num_programs: int, seed: int = 0) -> None:
        self.tree = RadixTree(_PAGE)
        self.ns: dict[str, list[int]] = {}
        self._random = random.Random(seed)
        self._next_page = {Tier.HBM: 0, Tier.DRAM: 0}
        each = -(-num_pages // num_programs) + num_pages // num_programs // 9
        head = max(each // 10, 1)
        tokens = np.arange(num_programs * each * _PAGE, dtype=np.int64).reshape(num_programs, -1)
        for program in range(num_programs):
            tokens[program, : head * _PAGE] = tokens[program // _GROUP * _GROUP, : head * _PAGE]
        self.prompts = tokens
        for program in range(num_programs):
            self.compute(program)
            if program % 2:
                self._set(program, Label.IDLE)
                self.copy(Tier.DRAM, path_to(self.tree.match(self.prompts[program]).node))
        # Of a small tree a part, so that there is always as much to evict.
        self._num_evicted = min(_EVICTED, self.tree.pages[Tier.DRAM].total // 4)
        self._full = {tier: self.tree.pages[tier].total for tier in Tier}
        self._turn = 0

    def compute(self, program: int) -> None:
        """The program's prompt is computed as far as it is not there."""
        name, tokens = f"program {program}", self.prompts[program]
        match = self.tree.match(tokens)
        self.tree.begin(name, name, match)
        self.tree.protect(match.node)
        missing = (len(tokens) - match.tokens) // _PAGE
        end = self.tree.insert(
            tokens,
            self._pages(Tier.HBM, missing),
            first_page=match.tokens // _PAGE,
            after=match,
            request=name,
        ).node
        self.tree.protect(end)
        self.tree.publish(name, end)
        self.tree.unprotect(end)
        self.tree.unprotect(match.node)
        self.tree.end(name, well=True)

    def copy(self, target: Tier, path: list[Node]) -> None:
        """Copy what of the path the target lacks, at once."""
        nodes = [node for node in path if node.states[target] is State.ABSENT]
        if nodes:
            pages = self._pages(target, sum(map(self.tree.num_pages, nodes)))
            self.tree.finish(self.tree.copy_to(target, nodes, pages), well=True)

    def round(self) -> None:
        """A match, a relabel and an eviction of each tier, timed; then both are full again."""
        program = self._random.randrange(len(self.prompts))
        self._timed("match", lambda: self.tree.match(self.prompts[program]))
        label = self._random.choice((Label.BUSY, Label.IDLE, Label.INACTIVE))
        self._timed("relabel", lambda: self._set(program, label))
        for tier in Tier:
            self._timed(f"evict {tier.name}", partial(self._evict, tier))
        self._refill()

    def _refill(self) -> None:
        """Bring programs back in turn until both tiers hold what they held."""
        pages = self.tree.pages
        while any(pages[tier].total < self._full[tier] for tier in Tier):
            path = path_to(self.tree.match(self.prompts[self._turn]).node)
            self.copy(Tier.HBM, path)
            self.compute(self._turn)
            if pages[Tier.DRAM].total < self._full[Tier.DRAM]:
                self.copy(Tier.DRAM, path_to(self.tree.match(self.prompts[self._turn]).node))
            self._turn = (self._turn + 1) % len(self.prompts)

    def _evict(self, tier: Tier) -> None:
        evicted = self.tree.evict(tier, self._num_evicted)
        assert evicted is not None
        assert evicted.ids(tier).size >= self._num_evicted

    def _set(self, program: int, label: Label) -> None:
        self.tree.relabel(f"program {program}", label)

    def _timed(self, call: str, what: Callable[[], Any]) -> Any:
        start = perf_counter_ns()
        result = what()
        self.ns.setdefault(call, []).append(perf_counter_ns() - start)
        return result

    def _pages(self, tier: Tier, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        first = self._next_page[tier]
        self._next_page[tier] = (first + count) % 2**30  # the tree does not care which they are
        return np.arange(first, first + count, dtype=np.int32)


def measure(num_pages: int, num_programs: int, num_rounds: int) -> list[dict[str, Any]]:
    """A record per call."""
    large = Large(num_pages, num_programs)
    held = large.tree.pages[Tier.HBM].total
    for _ in range(num_rounds):
        large.round()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    block = environment() | {"commit": commit(), "date": date}
    return [
        {
            "case": f"tree_large_{call.replace(' ', '_').lower()}",
            "pages": held,
            "programs": num_programs,
            "n": len(found),
            "us_p50": round(float(np.percentile(found, 50)) / 1e3, 1),
            "us_p99": round(float(np.percentile(found, 99)) / 1e3, 1),
            "us_max": round(max(found) / 1e3, 1),
            "simulated": False,
            "environment": block,
        }
        for call, found in large.ns.items()
    ]


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10_000)
    given = parser.parse_args()
    if not 1 <= given.programs <= given.pages or given.rounds < 1:
        parser.error("at least one round, one program, and a page for each program")
    if given.json:
        json_lines.check_writable(given.json)
    records = measure(given.pages, given.programs, given.rounds)
    table = Table(title=f"{records[0]['pages']:,} pages, {given.programs:,} programs, us per call")
    for heading in ("call", "n", "p50", "p99", "max", ""):
        table.add_column(heading, justify="right")
    for record in records:
        verdict = "met" if record["us_p99"] < _MOST_P99_US else "missed"
        times = (f"{record[f'us_{name}']:,.0f}" for name in ("p50", "p99", "max"))
        table.add_row(record["case"].removeprefix("tree_large_"), str(record["n"]), *times, verdict)
    Console(width=100).print(table)
    if given.json:
        json_lines.append(given.json, records)


if __name__ == "__main__":
    main()
