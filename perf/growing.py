"""A load for radix trees: programs share a system prompt and grow their contexts step by step.

Programs take their steps in random order. A step is a match of the prompt and an insert of what was
computed, as an engine's scheduler does per request; at the end all is evicted in portions of 8,192
tokens. Only the tree is timed: page ids come from a counter and no KV is touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

EVICT_TOKENS = 8192
_VOCABULARY = 150_000
_NUM_STEPS = 40
_SYSTEM_TOKENS = 2_000
_FINAL_TOKENS = 20_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """How many programs, in pages of how many tokens."""

    page_size: int
    num_programs: int


class Subject(Protocol):
    """A tree under load. Each call takes microseconds, which the load measures."""

    def match(self, step: int, program: int, tokens: array[int]) -> int:
        """Look up the prompt; returns how many of its tokens are there."""
        ...

    def prepare(self, tokens: array[int], matched: int, first_page: int) -> None:
        """Make what insert needs: new pages from `first_page` on. Not measured."""
        ...

    def insert(self) -> None:
        """Add what was prepared."""
        ...

    def finish(self) -> None:
        """The request is over; measured as "labels"."""
        ...

    def evict(self, num_tokens: int) -> int:
        """Free so many tokens, or what there is; returns how many."""
        ...


class Nothing:
    """No tree at all: what the load itself costs in memory."""

    def match(self, step: int, program: int, tokens: array[int]) -> int:
        return 0

    def prepare(self, tokens: array[int], matched: int, first_page: int) -> None:
        pass

    def insert(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def evict(self, num_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class Figures:
    """Mean microseconds per call, growth of the process in bytes, tokens that the tree held."""

    us: dict[str, float]
    grown_bytes: int
    num_tokens: int


def measure(subject: Subject, load: Load) -> Figures:
    """Put the load on the tree, in this process."""
    seconds: dict[str, list[float]] = {"match": [], "insert": [], "labels": [], "evict": []}
    gc.collect()
    gc.freeze()
    before = resident_bytes()
    first_page = 0
    num_tokens = 0
    for step, (program, tokens) in enumerate(_steps(load)):
        start = perf_counter()
        matched = subject.match(step, program, tokens)
        seconds["match"].append(perf_counter() - start)
        subject.prepare(tokens, matched, first_page)
        first_page += len(tokens) // load.page_size - matched // load.page_size
        start = perf_counter()
        subject.insert()
        seconds["insert"].append(perf_counter() - start)
        start = perf_counter()
        subject.finish()
        seconds["labels"].append(perf_counter() - start)
    num_tokens = first_page * load.page_size
    grown = resident_bytes() - before
    evicted = 1
    while evicted:
        start = perf_counter()
        evicted = subject.evict(EVICT_TOKENS)
        seconds["evict"].append(perf_counter() - start)
    return Figures({k: 1e6 * statistics.fmean(v) for k, v in seconds.items()}, grown, num_tokens)


def _steps(load: Load) -> Iterator[tuple[int, array[int]]]:
    """(program, its context by now), in random order."""
    rng = random.Random(0)
    system = array("q", (rng.randrange(_VOCABULARY) for _ in range(_SYSTEM_TOKENS)))
    contexts = [array("q", system) for _ in range(load.num_programs)]
    order = [program for program in range(load.num_programs) for _ in range(_NUM_STEPS)]
    rng.shuffle(order)
    per_step = (_FINAL_TOKENS - _SYSTEM_TOKENS) / _NUM_STEPS
    draws = np.random.default_rng(0)
    for program in order:
        count = int(rng.uniform(0.5, 1.5) * per_step)
        contexts[program].frombytes(draws.integers(_VOCABULARY, size=count).tobytes())
        yield program, contexts[program]


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def in_rounds(
    module: str, trees: Iterable[str], load: Load, num_rounds: int
) -> dict[str, list[Figures]]:
    """Figures of each tree from processes of their own, one after the other in every round."""
    found: dict[str, list[Figures]] = {tree: [] for tree in trees}
    for _ in range(num_rounds):
        for tree, figures in found.items():
            figures.append(_in_a_process(module, tree, load))
    return found


def _in_a_process(module: str, tree: str, load: Load) -> Figures:
    command = [sys.executable, "-m", module, "--tree", tree]
    command += ["--page-size", str(load.page_size), "--programs", str(load.num_programs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or [f"{tree} failed"])[-1])
    return Figures(**json.loads(done.stdout.strip().splitlines()[-1]))


def medians(runs: list[Figures]) -> dict[str, float]:
    """Median over rounds of each call's microseconds."""
    return {call: statistics.median(run.us[call] for run in runs) for call in runs[0].us}


def arguments(parser: argparse.ArgumentParser, trees: tuple[str, ...]) -> None:
    """The flags that the benchmarks share."""
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", choices=trees, help="this one alone, in this process, as JSON")
