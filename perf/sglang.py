"""What labels cost in SGLang's radix tree: kvtier's cache beside SGLang's own two cores.

    python -m perf.sglang [--quick] [--json FILE] [--page-size 16] [--programs 200]

The load is that of `perf.growing`. Each tree runs in a process of its own, rounds interleaved;
figures are medians over rounds, microseconds per call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf import json_lines
from perf.cpu_copy import commit
from perf.growing import Figures, Load, arguments, in_rounds, measure, medians
from perf.simulator import environment

_TREES = ("rust", "python", "labelled")
_CALLS = ("match", "insert", "labels", "evict")


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 programs, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--programs", type=int, default=200)
    arguments(parser, _TREES)
    given = parser.parse_args()
    load = Load(given.page_size, 20 if given.quick else given.programs)
    if given.tree:
        from perf.sglang_trees import SglangTree

        print(json.dumps(asdict(measure(SglangTree(given.tree, load.page_size), load))))
        return
    if given.json:
        json_lines.check_writable(given.json)
    runs = in_rounds("perf.sglang", _TREES, load, 1 if given.quick else given.rounds)
    records = list(compare(runs, load))
    Console(width=100).print(render(records, load))
    if given.json:
        json_lines.append(given.json, records)


def compare(runs: dict[str, list[Figures]], load: Load) -> Iterator[dict[str, Any]]:
    """A record per tree: microseconds of each call, and ratios to the Rust core."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    block = environment() | {"commit": commit(), "date": date}
    us = {tree: medians(found) for tree, found in runs.items()}
    step = {tree: sum(us[tree][call] for call in ("match", "insert", "labels")) for tree in runs}
    for tree, found in runs.items():
        yield {
            "case": f"sglang_tree_{tree}",
            "page_size": load.page_size,
            "programs": load.num_programs,
            "n": len(found),
            "us": {call: round(value, 1) for call, value in us[tree].items()},
            "step_us": round(step[tree], 1),
            "step_ratio_to_rust": round(step[tree] / step["rust"], 2),
            "evict_ratio_to_rust": round(us[tree]["evict"] / us["rust"]["evict"], 2),
            "simulated": False,
            "environment": block,
        }


def render(records: list[dict[str, Any]], load: Load) -> Table:
    """The records as a table."""
    table = Table(title=f"{load.num_programs} programs, page size {load.page_size}, us per call")
    for heading in ("tree", *_CALLS, "step / Rust", "evict / Rust"):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            record["case"].removeprefix("sglang_tree_"),
            *(f"{record['us'][call]:.0f}" for call in _CALLS),
            f"{record['step_ratio_to_rust']:.1f}",
            f"{record['evict_ratio_to_rust']:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
