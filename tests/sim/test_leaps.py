"""Leaping from change to change gives the times that stepping through every step gives."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvtier.hardware import load_gpu
from kvtier.layout import load_model
from kvtier.sim.cost import StepCost
from kvtier.sim.request import EngineSettings

from .engine_world import EngineWorld, LinearCost


@dataclass
class Job:
    """One request as the naive loop sees it."""

    name: str
    arrives_s: float
    context: int
    output: int
    left: int = 0
    produced: int = 0


def step_by_step(
    jobs: list[Job], cost: StepCost, limits: EngineSettings
) -> tuple[dict[str, float], dict[str, float]]:
    """First-token and end times of `jobs`, one step after another, HBM without end."""
    arrivals = sorted(jobs, key=lambda job: job.arrives_s)
    waiting: list[Job] = []
    prefill: list[Job] = []
    decode: list[Job] = []
    first: dict[str, float] = {}
    ended: dict[str, float] = {}
    now_s = 0.0
    while len(ended) < len(jobs):
        if not waiting and not prefill and not decode:
            now_s = max(now_s, arrivals[0].arrives_s)
        while arrivals and arrivals[0].arrives_s <= now_s:
            waiting.append(arrivals.pop(0))
        while (
            waiting
            and len(prefill) + len(decode) < limits.max_running
            and sum(job.left for job in prefill) < limits.chunk_tokens
        ):
            job = waiting.pop(0)
            job.left = job.context
            prefill.append(job)
        pieces, budget = [], limits.chunk_tokens
        for job in prefill:
            pieces.append((job, min(job.left, budget)))
            budget -= pieces[-1][1]
        chunk = sum(tokens for _, tokens in pieces)
        starts = sum(tokens * (job.context - job.left) for job, tokens in pieces)
        kv_tokens = sum(job.context + job.produced - 1 for job in decode)
        position = starts / chunk if chunk else 0.0
        now_s += cost.step_s(len(decode), kv_tokens, chunk, position)
        for job in decode:
            job.produced += 1
        for job, tokens in pieces:
            job.left -= tokens
            if job.left == 0:
                prefill.remove(job)
                decode.append(job)
                job.produced = 1
                first[job.name] = now_s
        for job in [j for j in decode if j.produced == j.output]:
            decode.remove(job)
            ended[job.name] = now_s
    return first, ended


def random_jobs(
    source: random.Random, num_jobs: int, max_context: int, max_output: int, span_s: float
) -> list[Job]:
    return [
        Job(
            f"r{index}",
            source.uniform(0, span_s),
            source.randint(1, max_context),
            source.randint(1, max_output),
        )
        for index in range(num_jobs)
    ]


def leap(jobs: list[Job], cost: StepCost, limits: EngineSettings) -> EngineWorld:
    world = EngineWorld(hbm=10**9, page=16, cost=cost, settings=limits, check=False)
    for job in jobs:
        world.ask_at(job.arrives_s, job.name, job.context, job.output)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_leaps_and_steps_agree_where_costs_are_linear(seed: int) -> None:
    source = random.Random(seed)
    limits = EngineSettings(
        chunk_tokens=source.choice([50, 128, 1000]),
        max_running=source.choice([3, 64]),
        reserve_tokens=0,
    )
    cost = LinearCost()
    jobs = random_jobs(source, 25, 1500, 120, span_s=source.choice([1.0, 20.0]))
    world = leap(jobs, cost, limits)
    first, ended = step_by_step(jobs, cost, limits)
    assert world.first == pytest.approx(first, rel=1e-6)
    assert world.ended == pytest.approx(ended, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_leaps_and_steps_agree_on_a_real_model(seed: int) -> None:
    source = random.Random(f"{seed}:real")
    limits = EngineSettings(reserve_tokens=0)
    cost = StepCost(load_model("Qwen2.5-7B"), load_gpu("H200"), 1)
    jobs = random_jobs(source, 25, 100_000, 400, span_s=30.0)
    world = leap(jobs, cost, limits)
    first, ended = step_by_step(jobs, cost, limits)
    assert world.ended == pytest.approx(ended, rel=0.005)
    assert world.first == pytest.approx(first, rel=0.005)


def test_a_long_prompt_takes_the_same_time_however_often_others_arrive() -> None:
    limits = EngineSettings(reserve_tokens=0)
    cost = StepCost(load_model("Qwen2.5-7B"), load_gpu("H200"), 1)

    def long_prompt_s(num_others: int) -> float:
        jobs = [Job("long", 0.0, 131_072, 1)]
        jobs += [Job(f"o{i}", 0.1 + 0.2 * i, 1, 1) for i in range(num_others)]
        return leap(jobs, cost, limits).first["long"]

    assert long_prompt_s(10) == pytest.approx(long_prompt_s(0), rel=0.01)
