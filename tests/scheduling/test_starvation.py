"""A program that is ready to run waits no longer than the bound (field bugs B23 and B44)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .scene import EXACT, Scene, forwarded, scene

BOUND = replace(EXACT, max_hold_s=600.0)


def starved(hbm_headroom: float = 0.0) -> Scene:
    """`keeper` is busier than `caller`, which is held since 100 s: no swap by the margin."""
    s = scene(settings=replace(BOUND, hbm_headroom=hbm_headroom), dram_tokens=1000)
    s.step("caller", 50, 0.0, 0.1)
    s.at(1.0).ask("keeper", 40)
    s.at(90.0).produce("keeper", 40)
    s.tick()
    s.at(99.0).finish("keeper")
    s.at(100.0).ask("caller", 50)
    assert s.held() == {"caller"}
    return s


def test_a_program_held_for_the_bound_enters_whatever_the_margins() -> None:
    s = starved()
    s.at(101.0).tick()
    assert s.held() == {"caller"}
    s.at(150.0).ask("keeper", 80)
    s.at(690.0).finish("keeper")
    s.at(699.0).tick()
    assert s.held() == {"caller"}
    assert forwarded(s.at(700.0).tick()) == ["caller"]
    assert s.queue("keeper") == "cpu"


def test_a_running_resident_is_marked_for_a_starved_program_and_goes_at_its_end() -> None:
    s = starved()
    s.at(101.0).ask("keeper", 80)
    s.at(700.0).tick()
    assert s.marked() == {"keeper"}
    assert forwarded(s.at(750.0).finish("keeper")) == ["caller"]


def test_just_enough_running_residents_are_marked_for_a_starved_program() -> None:
    s = scene(settings=BOUND)
    for name in ("a", "b", "c"):
        s.at(0.0).ask(name, 30)
    s.at(1.0).ask("caller", 35)
    s.at(601.0).tick()
    assert len(s.marked()) == 1


def test_room_that_becomes_free_is_kept_for_a_starved_program() -> None:
    s = scene(settings=BOUND)
    for name in ("a", "b", "c"):
        s.at(0.0).ask(name, 30)
    s.at(1.0).ask("caller", 65)
    s.at(601.0).tick()
    s.at(602.0).finish("a")
    assert forwarded(s.ask("small", 5)) == []
    s.at(603.0).finish("b")
    s.at(604.0).finish("c")
    s.at(605.0).tick()
    assert "caller" in s.running()


def test_the_longest_held_of_two_starved_programs_goes_first() -> None:
    s = scene(settings=BOUND)
    s.at(0.0).ask("keeper", 90)
    s.at(1.0).ask("first", 80)
    s.at(2.0).ask("second", 20)
    s.at(700.0).finish("keeper")
    s.at(701.0).tick()
    assert "first" in s.running()


def test_a_starved_program_that_needs_the_headroom_displaces_everybody() -> None:
    s = scene(hbm_tokens=1000, settings=replace(BOUND, hbm_headroom=0.02))
    s.step("resident", 100, 0.0, 1.0)
    s.at(20.0).ask("caller", 990)
    s.at(620.0).tick()
    assert s.running() == {"caller"}


def test_a_leaver_that_is_alone_with_its_head_gives_the_head_back_too() -> None:
    s = scene(hbm_tokens=1000, settings=BOUND)
    s.arrive("resident", "g", 250)
    s.step("resident", 300, 0.0, 1.0)
    s.at(20.0).ask("caller", 900)
    s.at(620.0).tick()
    assert s.running() == {"caller"}


@pytest.mark.parametrize("policy", ["mori", "elapsed"])
def test_a_burst_of_mixed_sizes_serves_the_largest_within_the_bound(policy: str) -> None:
    """Smallest first fills HBM with small programs for ever; the bound lets the large one in."""
    s = scene(policy, settings=replace(EXACT, max_hold_s=60.0), dram_tokens=0)
    s.ask("large", 90)
    s.at(0.0).cancel("large")
    small = [f"small{i}" for i in range(10)]
    for name in small:
        s.ask(name, 10)
    s.ask("large", 90)
    entered_s = None
    for now_s in range(1, 200):
        s.at(float(now_s))
        for name in sorted(s.running() - {"large"}):
            s.finish(name, 10)
            s.ask(name, 10)
        if now_s % 5 == 0:
            s.tick()
        if "large" in s.running():
            entered_s = now_s
            break
    assert entered_s is not None
    assert entered_s <= 60 + 10


@pytest.mark.parametrize("policy", ["mori", "elapsed", "lru"])
def test_held_programs_all_run_when_the_others_end(policy: str) -> None:
    s = scene(policy, "fixed:1", dram_tokens=0)
    names = [f"p{i}" for i in range(6)]
    for name in names:
        s.ask(name, 30)
    order = []
    while s.running():
        name = next(iter(s.running()))
        order.append(name)
        s.at(s.now_s + 1.0).finish(name)
        s.release(name)
    assert sorted(order) == names
    assert s.scheduler.programs == {}


def test_capped_requests_run_in_the_order_in_which_they_were_held() -> None:
    s = scene("lru", "request-cap:1")
    for name in ("a", "b", "c", "d"):
        s.ask(name, 10)
    order = []
    while s.running():
        name = next(iter(s.running()))
        order.append(name)
        s.at(s.now_s + 1.0).finish(name)
    assert order == ["a", "b", "c", "d"]
