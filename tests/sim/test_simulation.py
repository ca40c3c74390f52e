"""Whole runs: laws at every tick, same seed same bytes, workers, and who wins where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from kvtier.hardware import load_gpu
from kvtier.ids import Direction
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev
from kvtier.sim import CopyPath, Mode, SimSettings, simulate
from kvtier.sim.driver import Simulation
from kvtier.sim.workload import Gaps, plan_programs
from kvtier.traces import Trace, synth

from .simulation import (
    Watched,
    check_all_requests_are_somewhere,
    check_only_the_gpu_queue_runs,
    check_queues_fit,
)
from .traces import MODEL, gpu_with, program, trace_of

POLICIES = ("lru", "lru+offload", "lru+offload-wb", "elapsed", "mori")


@cache
def profile(name: str, num_programs: int = 12) -> Trace:
    return synth(name, num_programs, 1)


def settings(policy: str, **changes: object) -> SimSettings:
    base = SimSettings(
        policy=policy,
        model=MODEL,
        gpu=gpu_with(300_000),
        num_programs=12,
        duration_s=300.0,
        ramp_s=20.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


# Laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["coding-autonomous", "coding-interactive"])
@pytest.mark.parametrize(
    ("policy", "admission"),
    [("mori", "none"), ("elapsed", "none"), ("mori", "concur"), ("mori", "fixed:5")],
)
def test_queues_fit_their_memory_at_every_tick(trace: str, policy: str, admission: str) -> None:
    checks = [check_queues_fit, check_only_the_gpu_queue_runs, check_all_requests_are_somewhere]
    watched = Watched(profile(trace), settings(policy, admission=admission), checks).run()
    assert watched.num_ticks == 60
    assert watched.recorder.steps > 100
    assert watched.recorder.moves["demote"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", ["coding-interactive", "batch-react"])
def test_every_request_ends_once_under_every_policy(policy: str, trace: str) -> None:
    changed = settings(policy, num_programs=30, gpu=gpu_with(150_000), duration_s=150.0)
    watched = Watched(profile(trace, 30), changed, [check_all_requests_are_somewhere]).run()
    recorder = watched.recorder
    alive = recorder.programs - recorder.programs_ended
    assert alive == 30
    finished = watched.told(ev.RequestFinished)
    assert recorder.steps == len(finished)
    assert len(recorder.ttft_s) >= recorder.steps
    assert len(watched.told(ev.RequestForwarded)) >= recorder.steps


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ended_run_accounts_for_every_prompt_token(policy: str) -> None:
    record = simulate(
        profile("coding-autonomous"), settings(policy, mode=Mode.BATCH, num_programs=6)
    )
    hits = (record["hit_rate_hbm"] + record["hit_rate_dram"]) * record["prompt_tokens"]
    assert hits + record["prefilled_tokens"] == pytest.approx(record["prompt_tokens"])
    assert 0 < record["gpu_busy_share"] <= 1
    assert record["recomputed_tokens"] <= record["prefilled_tokens"]
    if policy == "lru":
        assert record["d2h_bytes"] == record["h2d_bytes"] == record["dram_tokens"] == 0


@pytest.mark.parametrize("policy", ["lru+offload", "lru+offload-wb", "mori"])
def test_hits_in_dram_move_their_bytes_up(policy: str) -> None:
    record = simulate(profile("coding-autonomous"), settings(policy))
    moved = record["h2d_bytes"] / MODEL.layout().bytes_per_token
    hits = record["hit_rate_dram"] * record["prompt_tokens"]
    assert hits > 0
    assert moved == pytest.approx(hits, rel=0.05)


def test_without_evictions_nothing_but_page_ends_is_computed_twice() -> None:
    trace = profile("coding-autonomous")
    record = simulate(trace, settings("infinite", mode=Mode.BATCH, num_programs=6))
    # One page at most per step, and the last token of each answer.
    assert record["recomputed_tokens"] <= record["steps"] * 65
    assert record["retractions"] == record["truncated_requests"] == 0


# Same seed, same bytes ---------------------------------------------------------------------

_RUN = """
import json, sys
from kvtier.sim import SimSettings, simulate
from kvtier.hardware import load_gpu
from kvtier.layout import load_model
from kvtier.traces import synth
from dataclasses import replace
model = load_model("Qwen2.5-7B")
gpu = replace(load_gpu("H200"), hbm_bytes=37 * 10**9)
trace = synth("coding-interactive", 12, 1)
for policy, admission, workers in (
    ("mori", "concur", 2), ("elapsed", "none", 1), ("lru+offload-wb", "none", 1)
):
    run = SimSettings(policy, model, gpu, admission, num_workers=workers, num_programs=16,
                      duration_s=120.0, seed=int(sys.argv[1]))
    print(json.dumps(simulate(trace, run), sort_keys=True))
"""


def _bytes(hash_seed: str, seed: str) -> bytes:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, seed], env=env, capture_output=True, check=True
    )
    return done.stdout


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    one, other = _bytes("1", "7"), _bytes("2", "7")
    assert len(one) > 1000
    assert one == other


def test_another_seed_gives_another_run() -> None:
    first, second = (
        simulate(profile("coding-autonomous"), settings("mori", seed=seed)) for seed in (1, 2)
    )
    assert first["steps"] != second["steps"]


def test_a_record_is_plain_json_and_names_its_conditions() -> None:
    trace = profile("coding-autonomous")
    record = simulate(trace, settings("mori", admission="fixed:6", seed=5, duration_s=60.0))
    assert json.loads(json.dumps(record))["steps"] == record["steps"]
    assert record["trace_sha256"] == trace.sha256
    assert (record["seed"], record["policy"], record["programs"]) == (5, "mori", 12)
    assert record["admission"] == "fixed:6"
    assert record["simulated"] is True
    assert {len(points) for points in record["series"].values()} == {13}
    assert record["series"]["t_s"] == [5.0 * i for i in range(13)]


# Several workers ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "mori"])
def test_programs_keep_their_worker_and_switches_are_counted(policy: str) -> None:
    changed = settings(policy, num_workers=3, num_programs=18, gpu=gpu_with(150_000))
    checks = [check_queues_fit] if policy == "mori" else []
    watched = Watched(profile("coding-autonomous", 18), changed, checks).run()
    assert set(watched.simulation.engines) == {"w0", "w1", "w2"}
    assert all(e.counters.finished_requests for e in watched.simulation.engines.values())
    where: dict[str, list[str]] = {}
    for _, command in watched.commands:
        if isinstance(command, cmd.Forward):
            where.setdefault(command.program, []).append(command.worker)
    changes = sum(
        before != after for workers in where.values() for before, after in pairwise(workers)
    )
    num_forwards = sum(len(workers) for workers in where.values())
    assert watched.recorder.switches >= changes
    if policy == "lru":
        assert watched.recorder.switches == 0
    assert changes <= 0.1 * num_forwards


def test_three_workers_serve_more_than_one() -> None:
    trace = profile("coding-autonomous", 18)
    one, three = (simulate(trace, settings("lru", num_workers=n, num_programs=18)) for n in (1, 3))
    assert three["output_tok_per_s"] > one["output_tok_per_s"]
    assert three["hbm_tokens"] == 3 * one["hbm_tokens"]


def test_each_rank_brings_a_link_of_its_own() -> None:
    def copy_s(tp: int, path: CopyPath) -> float:
        # Pages twice as long keep the fragment of a rank that has half of the heads.
        run = settings("mori", tp=tp, page_size=64 * tp, copy_path=path, gpu=load_gpu("H200"))
        plans = plan_programs(trace_of(program("p", [10])), 10_000, Gaps.RAW, 60.0)
        simulation = Simulation(run, plans)
        engine, _, _ = simulation._build_engine()
        ends: list[float] = []
        engine.cache.link.submit(Direction.H2D, 2 * 10**11, ends.append)
        while simulation.heap.step(float("inf")):
            pass
        return ends[0]

    for path in CopyPath:
        assert copy_s(2, path) == pytest.approx(copy_s(1, path) / 2, rel=0.01), path


# Who wins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["coding-autonomous", "coding-interactive"])
def test_hbm_without_end_bounds_every_policy(trace: str) -> None:
    changed = {"num_programs": 30, "duration_s": 300.0}
    bound = simulate(profile(trace, 30), settings("infinite", **changed))
    for policy in POLICIES:
        record = simulate(profile(trace, 30), settings(policy, **changed))
        assert record["output_tok_per_s"] <= bound["output_tok_per_s"] * 1.02, policy


def test_ten_programs_on_a_large_gpu_fare_alike_under_every_policy() -> None:
    changed = {"num_programs": 10, "gpu": load_gpu("H200"), "duration_s": 600.0}
    rates = [
        simulate(profile("coding-autonomous"), settings(policy, **changed))["output_tok_per_s"]
        for policy in (*POLICIES, "infinite")
    ]
    assert max(rates) <= 1.05 * min(rates)


def test_more_dram_never_hurts_the_hit_rate_of_write_back() -> None:
    rates = []
    for ratio in (0.0, 1.0, 4.0):
        record = simulate(
            profile("coding-autonomous", 30),
            settings("lru+offload-wb", num_programs=30, dram_ratio=ratio),
        )
        rates.append(record["hit_rate_hbm"] + record["hit_rate_dram"])
    assert rates == sorted(rates)
    assert rates[2] > rates[0] + 0.05


def test_a_slow_link_costs_time_and_not_only_hits() -> None:
    fast_gpu = gpu_with(300_000)
    slow_gpu = replace(fast_gpu, link_bytes_per_s=5e9, link_duplex_bytes_per_s=8.3e9)
    fast, slow = (
        simulate(
            profile("coding-autonomous", 30),
            settings("lru+offload-wb", num_programs=30, gpu=gpu, dram_ratio=4.0),
        )
        for gpu in (fast_gpu, slow_gpu)
    )
    assert fast["hit_rate_dram"] > 0.05
    assert slow["ttft_p50_s"] > fast["ttft_p50_s"]
    assert slow["output_tok_per_s"] < fast["output_tok_per_s"]


def test_too_many_programs_collapse_the_hit_rate_of_a_pool_without_offload() -> None:
    few, many = (
        simulate(
            profile("batch-react", 60),
            settings("lru", num_programs=n, mode=Mode.BATCH, gpu=gpu_with(60_000)),
        )
        for n in (5, 60)
    )
    assert few["hit_rate_hbm"] > many["hit_rate_hbm"] + 0.2


def test_a_fixed_window_bounds_the_programs_that_are_admitted() -> None:
    def check(watched: Watched, now_s: float) -> None:
        del now_s
        places = Counter(s.queue.value for s in watched.scheduler.programs.values())
        assert places["gpu"] <= 4

    changed = settings("lru", admission="fixed:4")
    watched = Watched(profile("coding-autonomous"), changed, [check]).run()
    assert watched.recorder.held_s > 0
