"""What the transfer engine itself costs: microseconds of CPU per job, chunk and idle poll.

    python -m perf.transfer_cost [--quick] [--json FILE]

The backend does nothing: each chunk ends as it starts. Jobs of one chunk and jobs of eleven run
alternately; a chunk costs a tenth of the difference, a job what is left of the first; `future` is
a job whose future somebody waits for. `descriptors` goes from scattered ids of 100,000 pages to
addresses for a copy engine: source, target and size per run of neighbours, chunk by chunk. `large
job` is what comes before it: the same job is checked, accepted and cut into ten chunks, much of
which is page faults. Medians over rounds, with 10th and 90th percentile. It is process time; still,
another process on the same physical core can double it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import process_time_ns
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvtier.errors import KvtierError, SimulationError
from kvtier.ids import Direction
from kvtier.transfer.backend import Done
from kvtier.transfer.chunks import Geometry, descriptors
from kvtier.transfer.core import TransferCore
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Chunk, Job, JobState
from perf.cpu_copy import commit
from perf.json_lines import append, check_writable
from perf.simulator import environment

_PAGE_BYTES = 2 << 20
_CHUNK_PAGES = 8
_NUM_PAGES = 100_000
_MOST_US = {
    "large_job": None,
    "descriptors": 5000.0,
    "job": 30.0,
    "future": None,
    "chunk": 10.0,
    "idle_poll": 5.0,
    "busy_poll": 5.0,
}
"""Targets, microseconds; None where there is none."""
_MORE_CHUNKS = 10
_GEOMETRY = Geometry(_NUM_PAGES, _NUM_PAGES, (_PAGE_BYTES,))

Ids = npt.NDArray[np.int32]


class NothingBackend:
    """Ends every chunk as it starts, or none while `holding`."""

    geometry = _GEOMETRY
    path_name = "nothing"
    polled = False

    def __init__(self, *, holding: bool = False) -> None:
        self.holding = holding
        self.held: list[Done] = []

    def start(self, chunk: Chunk, done: Done) -> None:
        if self.holding:
            self.held.append(done)
        else:
            done(None)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds of 200 jobs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 25, quick 5)")
    given = parser.parse_args()
    rounds = given.rounds or (5 if given.quick else 25)
    try:
        if given.json is not None:
            check_writable(given.json)
        records = list(measure(rounds, 200 if given.quick else 1000))
    except KvtierError as error:
        parser.error(str(error))
    Console(width=100).print(render(records))
    if given.json is not None:
        append(given.json, records)


def measure(num_rounds: int, num_jobs: int) -> Iterator[dict[str, Any]]:
    """A record per case, each after a round that is not timed."""
    found: dict[str, list[float]] = {name: [] for name in _MOST_US}
    for _ in range(num_rounds + 1):
        one, eleven = (_jobs_us(num_jobs, 1 + more) for more in (0, _MORE_CHUNKS))
        chunk_us = (eleven - one) / _MORE_CHUNKS
        found["chunk"].append(chunk_us)
        found["job"].append(one - chunk_us)
        found["future"].append(_jobs_us(num_jobs, 1, with_future=True) - chunk_us)
        found["idle_poll"].append(_poll_us(20 * num_jobs, busy=False))
        found["busy_poll"].append(_poll_us(20 * num_jobs, busy=True))
        for name, spent_us in zip(("large_job", "descriptors"), _large_job_us(), strict=True):
            found[name].append(spent_us)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    block = environment() | {"commit": commit(), "date": date}
    for name, values in found.items():
        p10, median, p90 = np.percentile(values[1:], (10, 50, 90))
        yield {
            "case": f"transfer_{name}",
            "median_us": round(float(median), 2),
            "p10_us": round(float(p10), 2),
            "p90_us": round(float(p90), 2),
            "n": num_rounds,
            "target_us": _MOST_US[name],
            "simulated": False,
            "environment": block,
        }


def _engine(backend: NothingBackend) -> TransferEngine:
    windows = {direction: FixedWindow() for direction in Direction}
    return TransferEngine(backend, chunk_bytes=_CHUNK_PAGES * _PAGE_BYTES, windows=windows)


def _jobs_us(num_jobs: int, num_chunks: int, *, with_future: bool = False) -> float:
    """CPU per job of `num_chunks` chunks, from ids to the poll that reports it."""
    num_pages = num_chunks * _CHUNK_PAGES
    scattered = _scattered(1)
    sources = [scattered[at * num_pages :][:num_pages] for at in range(num_jobs)]
    with _engine(NothingBackend()) as engine:
        engine.submit(Direction.H2D, scattered, scattered)  # touches the memory first
        engine.poll()
        began = process_time_ns()
        for source in sources:
            job = engine.submit(Direction.H2D, source, source)
            if with_future:
                job.future.result()
            engine.poll()
        spent = process_time_ns() - began
        _require_done(engine, num_jobs + 1)
    return spent / num_jobs / 1e3


def _poll_us(num_polls: int, *, busy: bool) -> float:
    """CPU per poll that finds nothing; `busy`: 100 jobs are in flight meanwhile."""
    backend = NothingBackend(holding=busy)
    with _engine(backend) as engine:
        jobs = [engine.submit(Direction.D2H, [page], [page]) for page in range(100)]
        engine.poll()
        began = process_time_ns()
        for _ in range(num_polls):
            engine.poll()
        spent = process_time_ns() - began
        if any((job.state is JobState.IN_FLIGHT) != busy for job in jobs):
            raise SimulationError("jobs are not in flight as they should be; nothing was measured")
        for done in backend.held:
            done(None)
        _require_done(engine, len(jobs))
    return spent / num_polls / 1e3


def _large_job_us() -> tuple[float, float]:
    """CPU to accept and cut a job of 100,000 pages, and from there to all its addresses."""
    windows = {direction: FixedWindow() for direction in Direction}
    core = TransferCore(_GEOMETRY, chunk_bytes=_NUM_PAGES // 10 * _PAGE_BYTES, windows=windows)
    source, target = _scattered(2), _scattered(3)
    for _ in range(2):  # the first one touches the memory
        began = process_time_ns()
        core.submit(Job(Direction.D2H, source, target), 0.0)
        chunks = core.issue(0.0)
        issued = process_time_ns()
        described = 0
        for chunk in chunks:
            pieces = descriptors(
                chunk.source_pages, 1 << 40, chunk.target_pages, 1 << 41, _PAGE_BYTES
            )
            described += int(pieces.num_bytes.sum())
        ended = process_time_ns()
        if described != _NUM_PAGES * _PAGE_BYTES:
            raise SimulationError("descriptors do not cover the job; nothing was measured")
        for chunk in chunks:
            core.ended(chunk, 0.0)
    return (issued - began) / 1e3, (ended - issued) / 1e3


def _scattered(seed: int) -> Ids:
    return np.random.default_rng(seed).permutation(_NUM_PAGES).astype(np.int32)


def _require_done(engine: TransferEngine, num_jobs: int) -> None:
    done = {s.labels: s.value for s in engine.metrics() if s.name == "kvtier_transfer_jobs_total"}
    if sum(v for labels, v in done.items() if ("outcome", "done") in labels) != num_jobs:
        raise SimulationError(f"of {num_jobs} jobs not all are done: {done}; nothing was measured")


def met(record: dict[str, Any]) -> str:
    """What the record says of its target; "-" where it has none."""
    if record["target_us"] is None:
        return "-"
    return "met" if record["median_us"] <= record["target_us"] else "missed"


def render(records: list[dict[str, Any]]) -> Table:
    """The records as a table."""
    table = Table(title="CPU of the transfer engine on a backend that does nothing, us")
    for heading in ("case", "p10", "median", "p90", "target", ""):
        table.add_column(heading, justify="right")
    for record in records:
        times = [record[key] for key in ("p10_us", "median_us", "p90_us", "target_us")]
        cells = ("-" if value is None else f"{value:,.1f}" for value in times)
        name = record["case"].removeprefix("transfer_").replace("_", " ")
        table.add_row(name, *cells, met(record))
    return table


if __name__ == "__main__":
    main()
