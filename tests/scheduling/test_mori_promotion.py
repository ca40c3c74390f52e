"""MORI, who enters HBM and where: promotion order, swaps, homes (papers 1.4, design section 6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.scheduling import SchedulerSettings
from kvtier.scheduling import commands as cmd
from kvtier.scheduling.events import Residency, WorkerDown

from .scene import EXACT, Scene, demoted, forwarded, labels, only, scene


def lose(s: Scene, program: str) -> None:
    """Its worker has dropped the program's copy."""
    s.send(Residency(program, s.scheduler.programs[program].epoch, 0, 0))


def test_promotion_order_is_dram_then_returning_then_new() -> None:
    s = scene(dram_tokens=100)
    for name, reasoning_s in (
        ("cpu_idle", 1),
        ("cpu_busy", 30),
        ("back_idle", 2),
        ("back_busy", 40),
    ):
        s.step(name, 10, 0.0, float(reasoning_s))
    s.at(41.0).ask("hog", 10)
    s.at(60.0).produce("hog", 85)
    assert len(demoted(s.tick())) == 4
    lose(s, "back_idle")
    lose(s, "back_busy")
    s.at(80.0)
    for name, tokens in (("new_large", 12), ("new_small", 8)):
        assert only(s.ask(name, tokens), cmd.Hold)
    for name in ("back_idle", "back_busy", "cpu_idle", "cpu_busy"):
        assert only(s.ask(name, 10), cmd.Hold)
    s.at(81.0).finish("hog")
    out = s.release("hog")
    assert forwarded(out) == [
        "cpu_busy", "cpu_idle", "back_busy", "back_idle", "new_small", "new_large",
    ]  # fmt: skip
    assert [c.program for c in only(out, cmd.Promote)] == ["cpu_busy", "cpu_idle"]
    assert set(labels(out).values()) == {"busy"}


def test_a_request_of_a_program_in_the_gpu_queue_is_forwarded_at_once() -> None:
    s = scene()
    s.step("a", 30, 0.0, 1.0)
    assert forwarded(s.at(500.0).ask("a", 35)) == ["a"]


def resident_and_caller(settings: SchedulerSettings = EXACT) -> Scene:
    """`resident` (80 of 100) acts since 10 s with iota 0 after 10 s of work; DRAM has room."""
    s = scene(settings=settings)
    s.step("resident", 80, 0.0, 10.0)
    return s


def test_a_held_program_displaces_an_idler_resident_and_the_resident_is_copied_first() -> None:
    s = resident_and_caller()
    out = s.at(100.0).ask("caller", 50)
    assert s.queues() == {"resident": "cpu", "caller": "gpu"}
    kinds = [type(command) for command in out]
    assert kinds.index(cmd.Demote) < kinds.index(cmd.Forward)


def test_a_resident_in_a_short_gap_is_not_displaced() -> None:
    s = resident_and_caller(replace(EXACT, dwell_s=0.0, swap_margin=0.0))
    assert forwarded(s.at(11.9).ask("caller", 50)) == []
    assert forwarded(s.at(12.1).tick()) == ["caller"]


def test_a_resident_that_has_just_moved_is_not_displaced() -> None:
    s = resident_and_caller(replace(EXACT, dwell_s=60.0))
    assert forwarded(s.at(59.0).ask("caller", 50)) == []
    assert forwarded(s.at(61.0).tick()) == ["caller"]


def test_a_resident_is_displaced_only_when_idler_by_the_margin() -> None:
    s = resident_and_caller(replace(EXACT, swap_margin=0.5))
    assert forwarded(s.at(19.0).ask("caller", 50)) == [], "9 s of gap after 10 s of work"
    assert forwarded(s.at(21.0).tick()) == ["caller"], "11 s of gap after 10 s of work"


def test_a_busier_resident_is_not_displaced() -> None:
    s = scene()
    s.step("caller", 50, 0.0, 1.0)
    s.at(2.0).ask("resident", 40)
    s.at(90.0).produce("resident", 40)
    s.tick()
    assert s.queue("caller") == "cpu"
    s.at(100.0).finish("resident")
    out = s.at(110.0).ask("caller", 50)
    assert s.held() == {"caller"}
    assert only(out, cmd.Demote) == []


def test_a_running_resident_is_never_displaced() -> None:
    s = scene()
    s.step("resident", 80, 0.0, 1.0)
    s.at(500.0).ask("resident", 80)
    s.at(510.0).ask("caller", 50)
    s.at(520.0).tick()
    assert (s.held(), s.marked()) == ({"caller"}, set())


def test_a_swap_takes_no_more_residents_than_it_needs() -> None:
    s = scene()
    s.step("idlest", 30, 0.0, 1.0)
    s.step("idle", 30, 1.0, 10.0)
    s.step("other", 30, 10.0, 30.0)
    assert demoted(s.at(200.0).ask("caller", 35)) == ["idlest"]


def test_a_swap_that_cannot_make_enough_room_moves_nobody() -> None:
    s = scene()
    s.step("idle", 30, 0.0, 1.0)
    s.at(2.0).ask("runner", 50)
    s.at(100.0).ask("caller", 60)
    assert s.queues() == {"idle": "gpu", "runner": "gpu", "caller": "waiting"}


def test_two_programs_can_change_places_when_dram_is_full() -> None:
    s = scene(hbm_tokens=100, dram_tokens=60)
    s.step("a", 60, 0.0, 40.0)
    s.at(50.0).ask("b", 60)
    assert s.queues() == {"a": "cpu", "b": "gpu"}
    s.at(51.0).finish("b")
    s.at(60.0).ask("a", 60)
    assert s.queues() == {"a": "gpu", "b": "cpu"}


def test_two_programs_larger_than_half_of_hbm_do_not_swap_on_every_short_tool_call() -> None:
    s = scene(hbm_tokens=100, dram_tokens=100)
    s.at(0.0).ask("a", 60)
    s.at(1.0).ask("b", 60)
    for step in range(1, 100):
        s.at(step * 3.0).finish("a")
        s.at(step * 3.0 + 1.0).tick()
        s.ask("a", 60)
    assert s.scheduler.programs["a"].num_moves == 1, "a one-second call never costs a copy"
    assert s.held() == {"b"}


def test_an_idle_programs_own_request_brings_it_back_up_to_its_own_worker() -> None:
    s = scene(hbm_tokens=100)
    s.step("a", 60, 0.0, 1.0)
    s.at(50.0).ask("b", 60)
    assert s.queue("a") == "cpu"
    s.worker("empty", 1000, 1000)
    assert only(s.at(60.0).ask("a", 60), cmd.Hold), "its copy is on w, where b runs"
    s.at(70.0).finish("b")
    out = s.release("b")
    assert only(out, cmd.Forward)[0].worker == "w"
    assert only(out, cmd.Promote)[0].worker == "w"


def test_a_waiting_program_goes_to_the_worker_with_most_free_room() -> None:
    s = scene(hbm_tokens=100)
    s.worker("large", 300)
    s.worker("middle", 200)
    assert [only(s.ask(name, 120), cmd.Forward)[0].worker for name in "abc"] == [
        "large", "middle", "large",
    ]  # fmt: skip


def test_a_program_without_a_copy_may_change_its_worker_and_the_old_one_drops_the_rest() -> None:
    s = scene(hbm_tokens=100, dram_tokens=0)
    s.step("a", 60, 0.0, 1.0)
    s.at(2.0).ask("hog", 40)
    s.at(50.0).produce("hog", 30)
    s.tick()
    assert s.queue("a") == "waiting"
    s.worker("v", 100)
    out = s.at(60.0).ask("a", 60)
    assert [c.worker for c in only(out, cmd.Drop)] == ["w"]
    assert [c.worker for c in only(out, cmd.Forward)] == ["v"]
    assert [c.worker for c in only(out, cmd.Route)] == ["v"]


def test_a_program_that_outgrows_its_worker_gives_up_its_copy_and_goes_where_it_fits() -> None:
    s = scene(hbm_tokens=100, dram_tokens=100)
    s.step("a", 60, 0.0, 1.0)
    s.at(50.0).ask("b", 60)
    assert s.queue("a") == "cpu"
    s.worker("large", 1000, 0)
    out = s.at(60.0).ask("a", 500)
    assert only(out, cmd.Forward)[0].worker == "large"
    assert [c.worker for c in only(out, cmd.Drop)] == ["w"]


@pytest.mark.parametrize("policy", ["mori", "elapsed", "lru"])
def test_no_request_is_forwarded_to_a_worker_that_it_cannot_fit(policy: str) -> None:
    s = scene(policy, hbm_tokens=100)
    s.step("a", 60, 0.0, 1.0)
    s.worker("large", 1000)
    assert only(s.at(60.0).ask("a", 500), cmd.Forward)[0].worker == "large"


@pytest.mark.parametrize("policy", ["mori", "elapsed", "lru"])
def test_a_program_larger_than_every_hbm_is_rejected_with_both_numbers(policy: str) -> None:
    s = scene(policy, hbm_tokens=100)
    s.worker("v", 150)
    reject = only(s.ask("a", 151), cmd.Reject)[0]
    assert "151" in reject.reason
    assert "150" in reject.reason
    assert s.held() == set()
    assert forwarded(s.ask("a", 150)) == ["a"]


def test_a_held_request_found_too_large_is_rejected_when_a_worker_comes() -> None:
    s = scene(hbm_tokens=100)
    s.send(WorkerDown("w"))
    assert only(s.ask("a", 500), cmd.Hold)
    assert [c.program for c in only(s.worker("w", 100), cmd.Reject)] == ["a"]
