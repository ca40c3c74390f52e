"""What labels cost in SGLang's radix tree: kvtier's cache beside SGLang's own two cores.

    python -m perf.sglang [--quick] [--json FILE] [--page-size 16] [--programs 200]

Programs share a system prompt and grow their contexts step by step, interleaved at random. A step
is a match of the prompt and an insert of what was computed, as SGLang's scheduler does per request;
at the end all is evicted in portions of 8,192 tokens. Only the tree is timed: page slots come
from a counter and no KV is touched. Each tree runs in a process of its own, rounds interleaved;
figures are medians over rounds, microseconds per call.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.cpu_copy import commit
from perf.simulator import environment

_TREES = ("rust", "python", "kvtier")
_CALLS = ("match", "insert", "end", "evict")
_EVICT_TOKENS = 8192
_VOCABULARY = 150_000


@dataclass(frozen=True)
class Load:
    """The same for every tree."""

    page_size: int
    num_programs: int
    num_steps: int = 40
    system_tokens: int = 2_000
    final_tokens: int = 20_000


@dataclass
class Slots:
    """Stands where SGLang's allocator is: hands out page-aligned slot numbers, counts frees."""

    page_size: int
    device: str = "cpu"
    size: int = 1 << 40
    next: int = 0
    num_freed: int = 0

    @property
    def size_full(self) -> int:
        return self.size

    def take(self, count: int) -> int:
        first = self.next
        self.next += count
        return first

    def available_size(self) -> int:
        return self.size - self.next + self.num_freed

    def free_segment(self, indices: Any, *, start_pos: int) -> None:
        self.num_freed += len(indices)

    def mamba_full_cache_donor(self) -> None:
        return None

    def get_kvcache(self) -> None:
        return None


@dataclass(eq=False)
class Params:
    """Sampling parameters as far as the cache reads them."""

    custom_params: dict[str, Any]


@dataclass(eq=False)
class Request:
    """A request as far as the cache reads it."""

    rid: str
    sampling_params: Params
    session: None = None
    session_id: None = None


@dataclass
class Times:
    """Seconds of each call."""

    calls: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _CALLS})

    def means_us(self) -> dict[str, float]:
        return {k: 1e6 * statistics.fmean(v) if v else 0.0 for k, v in self.calls.items()}


def main() -> None:
    """Measure, print the table, append JSON lines where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 programs, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", choices=_TREES, help="this one alone, in this process, as JSON")
    arguments = parser.parse_args()
    load = Load(arguments.page_size, 20 if arguments.quick else arguments.programs)
    if arguments.tree:
        print(json.dumps(run(arguments.tree, load)))
        return
    rounds = 1 if arguments.quick else arguments.rounds
    records = list(compare(load, rounds))
    Console(width=100).print(render(records, load))
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)


def compare(load: Load, num_rounds: int) -> Iterator[dict[str, Any]]:
    """A record per tree: median microseconds of each call, and as a ratio to the Rust core's."""
    runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in _TREES}
    for _ in range(num_rounds):
        for tree in _TREES:
            runs[tree].append(_in_a_process(tree, load))
    medians = {
        tree: {call: statistics.median(run[call] for run in found) for call in found[0]}
        for tree, found in runs.items()
    }
    block = environment() | {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat("T", "seconds"),
    }
    for tree in _TREES:
        mine, peer = medians[tree], medians["rust"]
        steps = [sum(m[call] for call in ("match", "insert", "end")) for m in (mine, peer)]
        yield {
            "case": f"sglang_tree_{tree}",
            "page_size": load.page_size,
            "programs": load.num_programs,
            "n": num_rounds,
            "us": {call: round(value, 1) for call, value in mine.items()},
            "step_us": round(steps[0], 1),
            "step_ratio_to_rust": round(steps[0] / steps[1], 2),
            "evict_ratio_to_rust": round(mine["evict"] / peer["evict"], 2),
            "simulated": False,
            "environment": block,
        }


def _in_a_process(tree: str, load: Load) -> dict[str, float]:
    command = [sys.executable, "-m", "perf.sglang", "--tree", tree]
    command += ["--page-size", str(load.page_size), "--programs", str(load.num_programs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1] if done.stderr else f"{tree} failed")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def run(tree: str, load: Load) -> dict[str, float]:
    """Mean microseconds per call of one tree under the load."""
    slots = Slots(load.page_size)
    cache = build(tree, slots)
    times = Times()
    gc.collect()
    gc.freeze()
    _grow(cache, slots, load, times, labelled=tree == "kvtier")
    _evict(cache, times)
    return times.means_us()


def build(tree: str, slots: Slots) -> Any:
    """SGLang's unified cache on its Rust or Python core, or kvtier's on the Python core."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from kvtier.integration.sglang.cache import LabelledRadixCache
    from kvtier.integration.sglang.eviction import LabelledFullComponent

    arguments = ServerArgs(model_path="dummy", page_size=slots.page_size, device="cpu")
    set_global_server_args_for_scheduler(arguments)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=slots,
        page_size=slots.page_size,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="rust" if tree == "rust" else "python",
    )
    if tree != "kvtier":
        return UnifiedRadixCache(params)
    params.component_registry_override = {ComponentType.FULL: LabelledFullComponent}
    return LabelledRadixCache(params)


def _grow(cache: Any, slots: Slots, load: Load, times: Times, *, labelled: bool) -> None:
    """All steps of all programs, in random order."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    torch.set_num_threads(1)
    rng = random.Random(0)
    system = array("q", (rng.randrange(_VOCABULARY) for _ in range(load.system_tokens)))
    contexts = [array("q", system) for _ in range(load.num_programs)]
    rows = [torch.empty(0, dtype=torch.int64) for _ in contexts]
    order = [program for program in range(load.num_programs) for _ in range(load.num_steps)]
    rng.shuffle(order)
    per_step = (load.final_tokens - load.system_tokens) / load.num_steps
    for step, program in enumerate(order):
        context = contexts[program]
        context.extend(
            rng.randrange(_VOCABULARY) for _ in range(int(rng.uniform(0.5, 1.5) * per_step))
        )
        request = _request(step, program)
        key = RadixKey(context, limit=len(context) - 1)
        with _timed(times, "match"):
            hit = cache.match_prefix(MatchPrefixParams(key=key, req=request))
        have = hit.device_prefix_len
        aligned = len(context) // load.page_size * load.page_size
        first = slots.take(aligned - have)
        if len(rows[program]) < have:  # the system prompt, computed by another program
            rows[program] = cache.path_device_indices(hit.last_device_node)
        new = torch.arange(first, first + aligned - have)
        rows[program] = torch.cat((rows[program][:have], new))
        insert = InsertParams(
            key=RadixKey(context[:aligned]),
            value=rows[program].clone(),
            prev_prefix_len=have,
            inserted_len=have,
        )
        with _timed(times, "insert"):
            result = cache.insert(insert)
        if labelled:
            with _timed(times, "end"):
                node = cache.tree_core.node_by_id(result.last_device_node)
                cache.programs.published(request.rid, node)
                cache.programs.ended(request.rid, well=True)


def _request(step: int, program: int) -> Request:
    labels = {"program": f"program-{program}", "label": ("busy", "idle")[program % 2]}
    return Request(str(step), Params({"kvtier": labels}))


def _evict(cache: Any, times: Times) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    evicted = 1
    while evicted:
        with _timed(times, "evict"):
            evicted = cache.evict(EvictParams(num_tokens=_EVICT_TOKENS)).num_tokens_evicted


class _timed:  # noqa: N801 - reads as a statement
    """Adds the seconds of its block to the times of a call."""

    def __init__(self, times: Times, call: str) -> None:
        self._seconds = times.calls[call]

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds.append(perf_counter() - self._start)


def render(records: list[dict[str, Any]], load: Load) -> Table:
    """The records as a table."""
    table = Table(title=f"{load.num_programs} programs, page size {load.page_size}, us per call")
    for heading in ("tree", "match", "insert", "labels", "evict", "step / Rust", "evict / Rust"):
        table.add_column(heading, justify="right")
    for record in records:
        us = record["us"]
        table.add_row(
            record["case"].removeprefix("sglang_tree_"),
            *(f"{us[call]:.0f}" for call in _CALLS),
            f"{record['step_ratio_to_rust']:.1f}",
            f"{record['evict_ratio_to_rust']:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
