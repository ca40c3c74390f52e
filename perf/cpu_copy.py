"""How fast CpuCopy is beside a plain memcpy of the same bytes between the same buffers.

    python -m perf.cpu_copy [--quick] [--json FILE] [--payload-mib 128]

One allocation laid out [segment][page][row] and one packed buffer, both on huge pages and touched
first. Every row size checks its bytes before it is timed. In each round memcpy (one thread,
np.copyto) and all cases run one after the other; a share is the median over rounds of memcpy's time
over the case's. GB/s are 1e9 bytes of payload per second, read once and written once.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvtier.errors import ConfigError, KvtierError, SimulationError
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import torch
from perf.json_lines import append, check_writable
from perf.simulator import environment

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_NUM_SEGMENTS = 32
_POOL_FACTOR = 8
"""Pool bytes over payload bytes: scattered ids must not be most of the pool."""
_ROW_BYTES = tuple(1 << exponent for exponent in range(9, 21))
_QUICK_ROW_BYTES = (2048, 32768)
_ORDERS = ("scattered", "sorted")
_DIRECTIONS = ("gather", "scatter")
_THREADS = (1, 2)
_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MIB = 1 << 20
_FILL_WORDS = 1 << 20
_ODD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its multiples differ

_SMALL_ROW, _LARGE_ROW = 2048, 32768
_SMALL_TARGETS = {1: 0.40, 2: 0.65}
_LARGE_TARGETS = {
    (1, "scattered"): 0.85,
    (1, "sorted"): 0.95,
    (2, "scattered"): 1.05,
    (2, "sorted"): 1.05,
}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    row_bytes: int
    direction: str
    order: str
    num_threads: int

    @property
    def target_share(self) -> float | None:
        """The least share of memcpy's speed that this case is to reach, where there is one."""
        if self.row_bytes >= _LARGE_ROW:
            return _LARGE_TARGETS[self.num_threads, self.order]
        return _SMALL_TARGETS[self.num_threads] if self.row_bytes == _SMALL_ROW else None


@dataclass(frozen=True)
class Bench:
    """The buffers, seen with one row size. memory is [segments, pages, row_bytes]."""

    memory: Bytes
    packed: Bytes
    pool: PagedPool
    ids: dict[str, Ids]
    backends: dict[int, CpuCopy]

    def run(self, case: Case) -> None:
        backend, ids = self.backends[case.num_threads], self.ids[case.order]
        copy = backend.gather if case.direction == "gather" else backend.scatter
        copy(self.pool, ids, torch.from_numpy(self.packed))

    def memcpy(self, direction: str) -> None:
        """As many bytes between the same two buffers, contiguous, one thread."""
        pool = self.memory.reshape(-1)[: self.packed.size]
        packed = self.packed.reshape(-1)
        target, source = (packed, pool) if direction == "gather" else (pool, packed)
        np.copyto(target, source)


def main() -> None:
    """Measure, print the table, and append JSON lines to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="2 KiB and 32 KiB rows, few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--payload-mib", type=int, default=128, help="MiB per copy (default 128)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 15, quick 5)")
    arguments = parser.parse_args()
    row_sizes = _QUICK_ROW_BYTES if arguments.quick else _ROW_BYTES
    default_rounds = 5 if arguments.quick else 15
    rounds = default_rounds if arguments.rounds is None else arguments.rounds
    try:
        if arguments.json is not None:
            check_writable(arguments.json)
        records = list(measure(row_sizes, arguments.payload_mib * _MIB, rounds))
    except KvtierError as error:
        parser.error(str(error))
    Console(width=110).print(render(records))
    if arguments.json is not None:
        append(arguments.json, records)


def measure(
    row_sizes: tuple[int, ...], payload_bytes: int, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """A record per case.

    Raises ConfigError for a payload that is no whole number of pages or does not fit into free
    memory, and for less than one round; SimulationError where a copy moved wrong bytes.
    """
    check_sizes(max(row_sizes), payload_bytes, num_rounds)
    block = conditions(payload_bytes)
    memory, packed = huge(payload_bytes * _POOL_FACTOR), huge(payload_bytes)
    fill(memory, np.uint64(0))
    backends = {count: CpuCopy(count) for count in _THREADS}
    for row_bytes in row_sizes:
        bench = view(memory, packed, row_bytes, backends)
        cases = [
            Case(row_bytes, direction, order, count)
            for direction in _DIRECTIONS
            for order in _ORDERS
            for count in _THREADS
        ]
        for case in cases:
            check_bytes(bench, case)
        yield from summarize(cases, timed(bench, cases, num_rounds), payload_bytes, block)
    for backend in backends.values():
        backend.close()


def check_sizes(row_bytes: int, payload_bytes: int, num_rounds: int) -> None:
    """Raise ConfigError for what cannot be measured; see `measure`."""
    if num_rounds < 1:
        raise ConfigError(f"{num_rounds} rounds; pass 1 or more")
    if payload_bytes < 1 or payload_bytes % (_NUM_SEGMENTS * row_bytes):
        page_mib = _NUM_SEGMENTS * row_bytes / _MIB
        raise ConfigError(
            f"a payload of {payload_bytes / _MIB:g} MiB; pass a multiple of {page_mib:g} MiB"
        )
    needed, free = payload_bytes * (_POOL_FACTOR + 1), free_bytes()
    if needed > free:
        raise ConfigError(
            f"a payload of {payload_bytes / _MIB:g} MiB takes {needed / _MIB:,.0f} MiB of memory, "
            f"{free / _MIB:,.0f} are free; pass a smaller one"
        )


def free_bytes() -> int:
    """Memory that can be taken without swapping, as far as Linux says."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) << 10
    limit = Path("/sys/fs/cgroup/memory.max")  # of the container, where there is one
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return free if text == "max" else min(free, int(text))


def huge(num_bytes: int) -> Bytes:
    """uint8[num_bytes] on huge pages, each touched; private, since a shared mapping gets none."""
    area = mmap(-1, num_bytes + _HUGE_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    area.madvise(_MADV_HUGEPAGE)
    everything = np.frombuffer(area, dtype=np.uint8)
    first = -everything.ctypes.data % _HUGE_BYTES
    memory: Bytes = everything[first : first + num_bytes]
    memory[:] = 1
    return memory


def fill(memory: Bytes, first: np.uint64) -> None:
    """No two words alike; another `first`, other words."""
    words = memory.reshape(-1).view(np.uint64)
    for at in range(0, words.size, _FILL_WORDS):
        part = words[at : at + _FILL_WORDS]
        np.multiply(np.arange(at, at + part.size, dtype=np.uint64), _ODD, out=part)
        part += first


def view(memory: Bytes, packed: Bytes, row_bytes: int, backends: dict[int, CpuCopy]) -> Bench:
    page_bytes = _NUM_SEGMENTS * row_bytes
    rows = memory.reshape(_NUM_SEGMENTS, -1, row_bytes)
    chosen = np.random.default_rng(row_bytes).permutation(rows.shape[1])
    scattered = chosen[: packed.size // page_bytes]
    return Bench(
        rows,
        packed.reshape(-1, page_bytes),
        PagedPool.of(list(torch.from_numpy(rows))),
        {"scattered": scattered, "sorted": np.sort(scattered)},
        backends,
    )


def check_bytes(bench: Bench, case: Case) -> None:
    """Raise SimulationError unless the copy moves exactly its bytes."""
    ids = bench.ids[case.order]
    num_segments, num_pages, row_bytes = bench.memory.shape
    words = bench.memory.view(np.uint64)
    before = words.sum(axis=2)
    if case.direction == "gather":
        bench.packed[:] = 0
    else:
        fill(bench.packed, before.sum())  # other bytes than those that the pool holds
    bench.run(case)
    rows = bench.packed.reshape(ids.size, num_segments, row_bytes)
    after = words.sum(axis=2)
    others = np.setdiff1d(np.arange(num_pages), ids) if case.direction == "scatter" else slice(None)
    exact = all(np.array_equal(rows[i], bench.memory[:, page]) for i, page in enumerate(ids))
    if not exact or not np.array_equal(before[:, others], after[:, others]):
        raise SimulationError(f"{case} moved wrong bytes; its times would mean nothing")


def timed(bench: Bench, cases: list[Case], num_rounds: int) -> dict[Case | str, list[float]]:
    """Seconds of each round per case, and of memcpy per direction. The first round is not kept."""
    work: dict[Case | str, Callable[[], None]] = {}
    for direction in _DIRECTIONS:
        work[direction] = partial(bench.memcpy, direction)
        for case in cases:
            if case.direction == direction:
                work[case] = partial(bench.run, case)
    times: dict[Case | str, list[float]] = {key: [] for key in work}
    for round_ in range(num_rounds + 1):
        for key, copy in work.items():
            start_s = perf_counter()
            copy()
            if round_:
                times[key].append(perf_counter() - start_s)
    return times


def summarize(
    cases: list[Case],
    times: dict[Case | str, list[float]],
    payload_bytes: int,
    block: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    for case in cases:
        mine, memcpy = np.array(times[case]), np.array(times[case.direction])
        low, middle, high = np.percentile(mine, (10, 50, 90))
        share = float(np.median(memcpy / mine))
        target = case.target_share
        yield {
            "case": f"cpu_{case.direction}",
            "row_bytes": case.row_bytes,
            "ids": case.order,
            "threads": case.num_threads,
            "num_pages": payload_bytes // (_NUM_SEGMENTS * case.row_bytes),
            "median_us": round(middle * 1e6, 1),
            "p10_us": round(low * 1e6, 1),
            "p90_us": round(high * 1e6, 1),
            "n": len(mine),
            "gb_per_s": round(payload_bytes / middle / 1e9, 2),
            "memcpy_gb_per_s": round(payload_bytes / float(np.median(memcpy)) / 1e9, 2),
            "share_of_memcpy": round(share, 3),
            "target_share": target,
            "met": None if target is None else share >= target,
            "simulated": False,
            "environment": block,
        }


def conditions(payload_bytes: int) -> dict[str, Any]:
    """What the figures depend on, the load of the machine included."""
    return environment() | {
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "segments": _NUM_SEGMENTS,
        "payload_bytes": payload_bytes,
        "pool_bytes": payload_bytes * _POOL_FACTOR,
    }


def commit() -> str:
    """The commit that is checked out, "-dirty" where files differ from it."""
    described = subprocess.run(
        ("git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() if described.returncode == 0 else "not a git checkout"


def render(records: list[dict[str, Any]]) -> Table:
    """The records as a table; shares in percent of the memcpy of the same rounds."""
    block = records[0]["environment"]
    title = (
        f"{block['cpu']}, {block['cores']} cores, load {block['load_average_1min']}, numpy "
        f"{block['numpy']}, torch {block['torch']}, {block['libc']}, "
        f"{block['payload_bytes'] // _MIB} MiB per copy"
    )
    table = Table(title=title)
    for heading in ("copy", "row", "ids", "threads", "GB/s", "memcpy", "share", "target", ""):
        table.add_column(heading, justify="right")
    for record in records:
        target = record["target_share"]
        table.add_row(
            record["case"],
            str(record["row_bytes"]),
            record["ids"],
            str(record["threads"]),
            f"{record['gb_per_s']:.2f}",
            f"{record['memcpy_gb_per_s']:.2f}",
            f"{record['share_of_memcpy']:.0%}",
            "-" if target is None else f"{target:.0%}",
            {None: "", True: "met", False: "not met"}[record["met"]],
        )
    return table


if __name__ == "__main__":
    main()
