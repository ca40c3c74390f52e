"""A program's way through the runtime, as a ratio to two plain memcpys of its bytes.

    python -m perf.runtime [--quick] [--json FILE]

On a CPU: match, extend and publish a prompt of 20,000 tokens, demote it, and load it again for its
next call. What lies between (another program that takes its place in HBM) is not timed. Beside it,
in the same round, one thread copies as many bytes out to cold memory and back. Medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvtier.errors import KvtierError, SimulationError
from kvtier.layout import KVDtype, KVLayout, Segment
from kvtier.runtime import Program, TieredRuntime
from perf.cpu_copy import commit
from perf.json_lines import append, check_writable
from perf.simulator import environment

_PAGE_SIZE = 16
_NUM_SEGMENTS = 16
_MOST_RATIO = 1.3
_TARGET_FROM_BYTES = 32 << 10
_STAGES = ("match", "extend", "demote", "promote")


@dataclass(frozen=True)
class Case:
    """`row_bytes` of a page in each of 16 segments."""

    row_bytes: int
    num_tokens: int

    @property
    def layout(self) -> KVLayout:
        token_bytes = self.row_bytes // _PAGE_SIZE
        segments = tuple(Segment(f"kv{n}", n, token_bytes) for n in range(_NUM_SEGMENTS))
        return KVLayout(segments, KVDtype.BF16, _PAGE_SIZE)

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * _NUM_SEGMENTS * self.row_bytes // _PAGE_SIZE


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 tokens, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    num_tokens, num_rounds = (2_000, 1) if given.quick else (20_000, given.rounds)
    try:
        if given.json:
            check_writable(given.json)
        records = list(measure(num_tokens, num_rounds))
    except KvtierError as error:
        parser.error(str(error))
    Console(width=110).print(render(records))
    if given.json:
        append(given.json, records)


def measure(num_tokens: int, num_rounds: int) -> Iterator[dict[str, Any]]:
    """A record per row size."""
    for row_bytes in (8 << 10, 32 << 10, 64 << 10):
        case = Case(row_bytes, num_tokens // _PAGE_SIZE * _PAGE_SIZE)
        rounds = list(_rounds(case, num_rounds))
        ratios = [sum(stages.values()) / copied_s for stages, copied_s in rounds]
        ratio = statistics.median(ratios)
        block = environment() | {"commit": commit()}
        yield {
            "case": "runtime_program",
            "row_bytes": row_bytes,
            "tokens": case.num_tokens,
            "bytes": case.num_bytes,
            "n": num_rounds,
            "ms": {
                stage: round(1e3 * statistics.median(stages[stage] for stages, _ in rounds), 3)
                for stage in _STAGES
            },
            "memcpy_ms": round(1e3 * statistics.median(copied_s for _, copied_s in rounds), 3),
            "ratio": round(ratio, 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "met": ratio <= _MOST_RATIO if row_bytes >= _TARGET_FROM_BYTES else None,
            "simulated": False,
            "environment": block | {"date": datetime.now(UTC).isoformat(timespec="seconds")},
        }


def _rounds(case: Case, num_rounds: int) -> Iterator[tuple[dict[str, float], float]]:
    """Seconds of each stage, and of two memcpys."""
    tokens = case.num_tokens
    source, target = (np.ones(case.num_bytes, np.uint8) for _ in range(2))
    with TieredRuntime(
        case.layout, hbm_tokens=tokens, dram_tokens=2 * tokens, ticks=False, policy="mori"
    ) as kv:
        _take_turns(kv, tokens, -1)  # touches all memory once
        for number in range(num_rounds):
            stages = _take_turns(kv, tokens, number)
            start = perf_counter()
            np.copyto(target, source)
            np.copyto(source, target)
            yield stages, perf_counter() - start


def _take_turns(kv: TieredRuntime, num_tokens: int, number: int) -> dict[str, float]:
    """A new program is computed, demoted, and loaded again after another took its place."""
    prompt = np.arange(num_tokens, dtype=np.int32) + (number + 1) % 3 * num_tokens
    half = num_tokens // 2 // _PAGE_SIZE * _PAGE_SIZE
    stages: dict[str, float] = {}
    program = kv.program(f"measured {number}")
    start = perf_counter()
    program.match(prompt)
    stages["match"] = perf_counter() - start
    call = program.inference(prompt[:half])
    start = perf_counter()
    call.start().result(60)
    call.extend(prompt[half:])
    stages["extend"] = perf_counter() - start
    mark = _write(kv, call.pages)  # what compute would do
    start = perf_counter()
    call.finish()
    stages["extend"] += perf_counter() - start
    start = perf_counter()
    if not program.demote().result(60):
        raise SimulationError("the demotion failed; nothing was timed")
    stages["demote"] = perf_counter() - start
    with kv.program("other").inference([number % 7] * num_tokens):
        pass
    kv.program("other").release()
    stages["promote"] = _load(program, prompt, mark, kv)
    program.release()
    return stages


def _write(kv: TieredRuntime, pages: npt.NDArray[np.int32]) -> list[int]:
    """Mark each page in every segment; returns the marks."""
    marks = [n % 251 for n in range(pages.size)]
    for segment in kv.segments("numpy"):
        segment[pages, 0] = marks
    return marks


def _load(
    program: Program, prompt: npt.NDArray[np.int32], marks: list[int], kv: TieredRuntime
) -> float:
    """Seconds until the prompt's pages are in HBM again; then they are looked at."""
    start = perf_counter()
    with program.inference(prompt) as call:
        loaded_s = perf_counter() - start
        if call.cached_tokens != len(prompt):
            raise SimulationError(f"only {call.cached_tokens} tokens came back")
        for segment in kv.segments("numpy"):
            if segment[call.pages, 0].tolist() != marks:
                raise SimulationError("a page that came back is not what was written")
    return loaded_s


def render(records: list[dict[str, Any]]) -> Table:
    """The records as a table."""
    first = records[0]
    table = Table(title=f"a program of {first['tokens']:,} tokens, ms, against two memcpys")
    for heading in ("row", "MB", *_STAGES, "memcpys", "ratio", "range", "<= 1.3"):
        table.add_column(heading, justify="right")
    for record in records:
        verdict = "-" if record["met"] is None else "met" if record["met"] else "missed"
        table.add_row(
            f"{record['row_bytes'] >> 10} KiB",
            f"{record['bytes'] / 1e6:.0f}",
            *(f"{record['ms'][stage]:.1f}" for stage in _STAGES),
            f"{record['memcpy_ms']:.1f}",
            f"{record['ratio']:.2f}",
            f"{record['ratio_min']:.2f}-{record['ratio_max']:.2f}",
            verdict,
        )
    return table


if __name__ == "__main__":
    main()
