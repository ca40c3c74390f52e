"""Constant bounds: a fixed agent cap and a request cap, under every rule of placement."""

from __future__ import annotations

import pytest

from kvtier.errors import KvtierError
from kvtier.scheduling import FixedWindow, NoAdmission, RequestCap
from kvtier.scheduling import commands as cmd

from .scene import forwarded, only, scene

RULES = ("lru", "mori", "elapsed")


@pytest.mark.parametrize("policy", RULES)
def test_a_fixed_window_counts_programs_in_tool_calls_too(policy: str) -> None:
    s = scene(policy, "fixed:2", hbm_tokens=1000)
    s.step("a", 10, 0.0, 1.0)
    s.at(1.5).ask("b", 10)
    assert only(s.at(2.0).ask("c", 10), cmd.Hold)
    s.at(2.5).finish("b")
    assert s.held() == {"c"}


@pytest.mark.parametrize("policy", RULES)
def test_a_program_that_ends_frees_its_slot_at_once(policy: str) -> None:
    s = scene(policy, "fixed:2", hbm_tokens=1000)
    s.ask("a", 10)
    s.ask("b", 10)
    s.ask("c", 10)
    s.at(1.0).finish("a")
    assert forwarded(s.release("a")) == ["c"]


@pytest.mark.parametrize("policy", RULES)
def test_an_admitted_program_is_never_held_by_the_agent_window(policy: str) -> None:
    s = scene(policy, "fixed:1", hbm_tokens=1000)
    for step in range(5):
        s.at(10.0 * step)
        assert forwarded(s.ask("a", 10)) == ["a"]
        s.at(10.0 * step + 1.0).finish("a")


@pytest.mark.parametrize("policy", RULES)
def test_a_request_cap_bounds_running_requests_and_not_programs(policy: str) -> None:
    s = scene(policy, "request-cap:2", hbm_tokens=1000)
    s.step("a", 10, 0.0, 1.0)
    s.step("b", 10, 1.0, 2.0)
    s.ask("c", 10)
    s.ask("d", 10)
    assert only(s.ask("a", 10), cmd.Hold)
    assert s.running() == {"c", "d"}
    assert set(s.queues().values()) == {"gpu"}
    assert forwarded(s.finish("c")) == ["a"]


@pytest.mark.parametrize("policy", RULES)
def test_a_cancelled_request_frees_its_place_under_the_cap(policy: str) -> None:
    s = scene(policy, "request-cap:1", hbm_tokens=1000)
    s.ask("a", 10)
    s.ask("b", 10)
    assert forwarded(s.cancel("a")) == ["b"]


@pytest.mark.parametrize("policy", RULES)
def test_each_worker_has_a_window_of_its_own(policy: str) -> None:
    s = scene(policy, "fixed:1", hbm_tokens=1000)
    s.worker("v", 1000)
    for name in ("a", "b", "c"):
        s.ask(name, 10)
    assert s.running() == {"a", "b"}
    assert {c.worker for c in s.scheduler.workers.values() if c.num_gpu == 1} == {"v", "w"}


def test_no_admission_bounds_nothing() -> None:
    s = scene("lru")
    for index in range(200):
        s.ask(f"p{index}", 90)
    assert len(s.running()) == 200
    assert NoAdmission().program_window("w") == float("inf")


@pytest.mark.parametrize("admission", [FixedWindow, RequestCap])
def test_a_bound_of_nobody_is_refused(admission: type) -> None:
    with pytest.raises(KvtierError, match="admits nobody"):
        admission(0)
