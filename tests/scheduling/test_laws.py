"""Random lives of programs under every policy and admission: the laws hold after every event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.scheduling import POLICIES
from kvtier.scheduling import events as ev

from .environment import Environment

ADMISSIONS = ("none", "fixed:3", "request-cap:2", "concur", "concur+")
INDEX = st.integers(0, 8)
AGE = st.integers(0, 1)
PERCENT = st.integers(0, 100)


class Lives(RuleBasedStateMachine):
    """Rules are what clients, workers and clocks do; the environment checks every answer."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy

    @initialize(
        admission=st.sampled_from(ADMISSIONS),
        capacities=st.lists(
            st.tuples(st.integers(100, 1000), st.integers(0, 1000)), min_size=1, max_size=3
        ),
    )
    def open(self, admission: str, capacities: list[tuple[int, int]]) -> None:
        workers = {f"w{i}": pair for i, pair in enumerate(capacities)}
        self.world = Environment(self.policy, admission, workers)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            for kind in sorted(self.world.counts):
                event(kind)

    @rule(index=INDEX, tokens=st.integers(1, 400))
    def ask(self, index: int, tokens: int) -> None:
        self.world.ask(index, tokens)

    @rule(index=INDEX, tokens=st.integers(400, 1100))
    def ask_much(self, index: int, tokens: int) -> None:
        self.world.ask(index, tokens)

    @rule(index=INDEX, group=INDEX, tokens=st.integers(0, 200))
    def arrive(self, index: int, group: int, tokens: int) -> None:
        self.world.arrive(index, group, tokens)

    @precondition(lambda self: self.world.healthy())
    @rule(index=INDEX, tokens=st.integers(0, 60))
    def finish(self, index: int, tokens: int) -> None:
        self.world.finish(index, tokens)

    @precondition(lambda self: self.world.healthy())
    @rule(index=INDEX, tokens=st.integers(1, 200))
    def produce(self, index: int, tokens: int) -> None:
        self.world.produce(index, tokens)

    @precondition(lambda self: self.world.held())
    @rule(index=INDEX)
    def cancel_held(self, index: int) -> None:
        self.world.cancel_held(index)

    @precondition(lambda self: self.world.running())
    @rule(index=INDEX)
    def cancel_running(self, index: int) -> None:
        self.world.cancel_running(index)

    @precondition(lambda self: self.world.programs)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.world.release(index)

    @precondition(lambda self: self.world.scheduler.workers)
    @rule(index=INDEX)
    def worker_goes(self, index: int) -> None:
        self.world.worker_goes(index)

    @precondition(lambda self: self.world.down())
    @rule(index=INDEX)
    def worker_returns(self, index: int) -> None:
        self.world.worker_returns(index)

    @precondition(lambda self: self.world.programs)
    @rule(index=INDEX, age=AGE, kept=PERCENT)
    def report(self, index: int, age: int, kept: int) -> None:
        self.world.report(index, age, kept)

    @precondition(lambda self: self.world.programs)
    @rule(index=INDEX, age=AGE, outcome=st.sampled_from(("copy_done", "copy_failed", "refuse")))
    def copy_ends(self, index: int, age: int, outcome: str) -> None:
        getattr(self.world, outcome)(index, age)

    @rule(index=INDEX, locked=PERCENT, cached=PERCENT, tokens=st.integers(0, 500))
    def stats(self, index: int, locked: int, cached: int, tokens: int) -> None:
        self.world.stats(index, locked, cached, tokens)

    @rule(seconds=st.sampled_from((0.1, 1.0, 5.0, 30.0, 120.0, -0.2, -3600.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from((0.0, 5.0, 61.0)))
    def tick(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.world.tick()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_law_holds_after_every_event(policy: str) -> None:
    run_state_machine_as_test(
        lambda: Lives(policy),
        settings=settings(
            max_examples=120 if POLICIES[policy].labels else 40,
            stateful_step_count=40,
            derandomize=True,
        ),
    )


def operations(world: Environment, rng: random.Random) -> list[tuple[int, Callable[[], None]]]:
    """Everything that can happen, with weights; arguments are drawn when it does."""

    def index() -> int:
        return rng.randrange(100)

    def age() -> int:
        return rng.randrange(2)

    def steps_s() -> float:
        return rng.choice((0.1, 1.0, 1.0, 5.0, 20.0, 70.0, -0.2, -30.0))

    return [
        (80, lambda: world.ask(index(), rng.randint(1, 300))),
        (6, lambda: world.ask(index(), rng.randint(500, 1100))),
        (90, lambda: world.finish(index(), rng.randint(0, 60))),
        (20, lambda: world.produce(index(), rng.randint(1, 100))),
        (50, lambda: world.pass_time(steps_s())),
        (20, world.tick),
        (12, lambda: world.arrive(index(), index(), rng.randint(0, 200))),
        (6, lambda: world.release(index())),
        (9, lambda: world.cancel_held(index())),
        (9, lambda: world.cancel_running(index())),
        (4, lambda: world.worker_goes(index())),
        (8, lambda: world.worker_returns(index())),
        (16, lambda: world.report(index(), age(), rng.choice((0, 60, 100, 100)))),
        (8, lambda: world.copy_done(index(), age())),
        (6, lambda: world.copy_failed(index(), age())),
        (6, lambda: world.refuse(index(), age())),
        (20, lambda: world.stats(index(), index(), index(), rng.randint(0, 500))),
    ]


Sizes = dict[str, tuple[int, int]]


def workers(seed: int, least_hbm: int, least_dram: int) -> Sizes:
    """One to three workers of up to 1000 tokens per tier; with `least_dram` 0 some have none."""
    rng = random.Random(seed)
    sizes = {}
    for index in range(1 + seed % 3):
        dram = rng.randint(least_dram, 1000) if least_dram or rng.randrange(4) else 0
        sizes[f"w{index}"] = (rng.randint(least_hbm, 1000), dram)
    return sizes


def live(policy: str, admission: str, sizes: Sizes, seed: int, num_steps: int) -> Environment:
    """A life of `num_steps` random operations, and its end."""
    rng = random.Random(f"{policy} {admission} {seed}")
    world = Environment(policy, admission, sizes)
    table = operations(world, rng)
    weights, actions = [weight for weight, _ in table], [action for _, action in table]
    for _ in range(num_steps):
        rng.choices(actions, weights)[0]()
    world.drain()
    return world


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", ["elapsed", "lru", "mori"])
def test_many_short_lives_on_all_shapes_of_workers_keep_every_law(
    policy: str, admission: str
) -> None:
    for seed in range(30):
        assert not live(policy, admission, workers(seed, 100, 0), seed, 120).requests


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_long_lives_meet_every_kind_of_event_and_keep_every_law(policy: str) -> None:
    counts: Counter[str] = Counter()
    for seed, admission in enumerate(ADMISSIONS):
        counts += live(policy, admission, workers(seed, 400, 400), seed, 1500).counts
    kinds = [kind.__name__ for kind in get_args(ev.Event)] + ["Forward", "Hold", "Reject", "Drop"]
    if POLICIES[policy].labels:
        kinds += ["Demote", "Promote", "SetLabel"]
    rare = {kind: counts[kind] for kind in kinds if counts[kind] < 50}
    assert not rare, f"hardly exercised: {rare}"
