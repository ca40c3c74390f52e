"""kvtier's radix tree beside SGLang's: microseconds per call, and bytes per cached token.

    python -m perf.tree [--quick] [--json FILE] [--page-sizes 1,16,64] [--programs 2000]

The load is that of `perf.growing`. Peers are SGLang's default, the unified cache on its Rust core,
and its older Python class. Each tree runs in a process of its own, rounds interleaved; times are
medians over rounds. Bytes per token: growth of the process, less what the load alone grows it by,
over the tokens that the tree holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.tree.node import Tier
from kvtier.tree.tree import Match, RadixTree
from perf import json_lines
from perf.cpu_copy import commit
from perf.growing import Figures, Load, Nothing, Subject, arguments, in_rounds, measure, medians
from perf.simulator import environment

_TREES = ("kvtier", "rust", "radix", "nothing")
_PEER = "rust"
_LEAST_SPEEDUP = {"step": 2.0, "evict": 5.0}
_MOST_MEMORY = {1: 2 / 3, 16: 1 / 3, 64: 1 / 3}
"""Share of the peer's bytes per token, by page size."""


class KvtierTree:
    """Our tree as an engine uses it: the insert goes on where the match ended."""

    def __init__(self, page_size: int) -> None:
        self._tree = RadixTree(page_size)
        self._page_size = page_size
        self._hit: Match | None = None
        self._next: tuple[Any, Any, int] | None = None

    def match(self, step: int, program: int, tokens: array[int]) -> int:
        self._hit = self._tree.match(np.frombuffer(tokens, np.int64)[:-1])
        return self._hit.hbm_tokens

    def prepare(self, tokens: array[int], matched: int, first_page: int) -> None:
        start = matched // self._page_size
        count = len(tokens) // self._page_size - start
        pages = np.arange(first_page, first_page + count, dtype=np.int32)
        self._next = (tokens, pages, start)

    def insert(self) -> None:
        assert self._next is not None
        tokens, pages, start = self._next
        key = np.frombuffer(tokens, np.int64)
        self._tree.insert(key, pages, first_page=start, after=self._hit)

    def finish(self) -> None:
        pass

    def evict(self, num_tokens: int) -> int:
        there = self._tree.pages[Tier.HBM].evictable
        count = min(num_tokens // self._page_size, there)
        evicted = self._tree.evict(Tier.HBM, count)
        assert evicted is not None
        return evicted.ids(Tier.HBM).size * self._page_size


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="400 programs, page 16, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--page-sizes", default="1,16,64")
    parser.add_argument("--programs", type=int, default=2000)
    arguments(parser, _TREES)
    given = parser.parse_args()
    if given.tree:
        load = Load(given.page_size, given.programs)
        print(json.dumps(asdict(measure(subject(given.tree, load.page_size), load))))
        return
    if given.json:
        json_lines.check_writable(given.json)
    sizes = [16] if given.quick else [int(size) for size in given.page_sizes.split(",")]
    trees = ("kvtier", "rust", "nothing") if given.quick else _TREES
    rounds = 1 if given.quick else given.rounds
    programs = 400 if given.quick else given.programs
    records = [
        record
        for size in sizes
        for record in compare(in_rounds("perf.tree", trees, Load(size, programs), rounds), size)
    ]
    Console(width=110).print(render(records, programs))
    if given.json:
        json_lines.append(given.json, records)


def subject(tree: str, page_size: int) -> Subject:
    """The tree by its name."""
    if tree == "kvtier":
        return KvtierTree(page_size)
    if tree == "nothing":
        return Nothing()
    from perf.sglang_trees import SglangTree

    return SglangTree(tree, page_size)


def compare(runs: dict[str, list[Figures]], page_size: int) -> Iterator[dict[str, Any]]:
    """A record per tree, with its ratios to the peer."""
    bare = statistics.median(run.grown_bytes for run in runs["nothing"])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    block = environment() | {"commit": commit(), "date": date}
    us = {tree: medians(found) for tree, found in runs.items()}
    step = {tree: us[tree]["match"] + us[tree]["insert"] for tree in runs}
    held = {tree: found[0].num_tokens for tree, found in runs.items()}
    grown = {tree: statistics.median(r.grown_bytes for r in found) for tree, found in runs.items()}
    size = {tree: (grown[tree] - bare) / held[tree] for tree in runs}
    for tree in runs:
        if tree == "nothing":
            continue
        yield {
            "case": f"tree_{tree}",
            "page_size": page_size,
            "n": len(runs[tree]),
            "us": {call: round(value, 1) for call, value in us[tree].items()},
            "step_speedup": round(step[_PEER] / step[tree], 2),
            "evict_speedup": round(us[_PEER]["evict"] / us[tree]["evict"], 2),
            "bytes_per_token": round(size[tree], 2),
            "memory_share": round(size[tree] / size[_PEER], 3),
            "held_tokens": held[tree],
            "simulated": False,
            "environment": block,
        }


def met(record: dict[str, Any]) -> str:
    """Which targets the record misses; "-" for a peer."""
    if record["case"] != "tree_kvtier":
        return "-"
    missed = [name for name, least in _LEAST_SPEEDUP.items() if record[f"{name}_speedup"] < least]
    if record["memory_share"] > _MOST_MEMORY.get(record["page_size"], 1.0):
        missed.append("memory")
    return f"missed: {', '.join(missed)}" if missed else "met"


def render(records: list[dict[str, Any]], num_programs: int) -> Table:
    """The records as a table; speedups and shares against the Rust core."""
    table = Table(title=f"{num_programs} programs, us per call, against SGLang's Rust core")
    headings = ("tree", "page", "match", "insert", "evict", "step", "evict", "B/token", "share", "")
    for heading in headings:
        table.add_column(heading, justify="right")
    for record in records:
        us = record["us"]
        table.add_row(
            record["case"].removeprefix("tree_"),
            str(record["page_size"]),
            *(f"{us[call]:.0f}" for call in ("match", "insert", "evict")),
            f"{record['step_speedup']:.1f}x",
            f"{record['evict_speedup']:.1f}x",
            f"{record['bytes_per_token']:.1f}",
            f"{record['memory_share']:.0%}",
            met(record),
        )
    return table


if __name__ == "__main__":
    main()
