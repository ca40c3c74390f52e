"""What workers report, stale or current, and what the labels say (design sections 5 and 6)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev

from .scene import Scene, forwarded, labels, only, scene


def demoted_scene(tokens: int = 60) -> Scene:
    """`a` is in the CPU queue of `w` since 50 s; `b` runs."""
    s = scene(hbm_tokens=100, dram_tokens=100)
    s.step("a", tokens, 0.0, 1.0)
    s.at(50.0).ask("b", 60)
    assert s.queues() == {"a": "cpu", "b": "gpu"}
    return s.at(51.0)


def epoch(s: Scene, program: str) -> int:
    return s.scheduler.programs[program].epoch


def residency(s: Scene, kept_tokens: int, age: int = 0) -> list[cmd.Command]:
    return s.send(ev.Residency("a", epoch(s, "a") - age, 0, kept_tokens))


def test_a_cpu_program_that_keeps_less_than_half_goes_to_waiting() -> None:
    s = demoted_scene()
    assert labels(residency(s, 29)) == {"a": "inactive"}
    assert s.queue("a") == "waiting"
    assert s.scheduler.workers["w"].cpu.tokens == 0


def test_a_cpu_program_that_keeps_half_stays() -> None:
    s = demoted_scene()
    assert residency(s, 30) == []
    assert s.queue("a") == "cpu"


def test_tokens_still_in_hbm_count_as_kept() -> None:
    s = demoted_scene()
    s.send(ev.Residency("a", epoch(s, "a"), 40, 10))
    assert s.queue("a") == "cpu"


def test_a_report_overwrites_the_sum_of_the_cpu_queue() -> None:
    s = demoted_scene()
    residency(s, 40)
    assert s.scheduler.workers["w"].cpu.tokens == 40


def test_a_shortened_copy_costs_its_whole_context_in_hbm_again() -> None:
    s = demoted_scene()
    residency(s, 40)
    s.ask("a", 60)
    s.at(60.0).finish("b")
    assert forwarded(s.release("b")) == ["a"]
    assert s.scheduler.workers["w"].staying.tokens == 60


def test_a_report_names_the_shared_head() -> None:
    s = demoted_scene()
    s.send(ev.Residency("b", epoch(s, "b"), 20, 0, "g", 40))
    s.send(ev.Residency("a", epoch(s, "a"), 0, 20, "g", 40))
    worker = s.scheduler.workers["w"]
    assert (worker.staying.tokens, worker.cpu.tokens) == (60, 60)
    s.at(60.0).finish("b")
    s.at(400.0).ask("a", 60)
    assert worker.staying.tokens == 80, "the head is there once"


@pytest.mark.parametrize(
    "report",
    [
        lambda e: ev.Residency("a", e, 0, 0),
        lambda e: ev.TransferFailed("a", e, ev.Direction.D2H),
        lambda e: ev.CommandRefused("a", e, "no room"),
    ],
    ids=["residency", "failed", "refused"],
)
def test_a_stale_report_changes_nothing_and_is_counted(report: object) -> None:
    s = demoted_scene()
    assert s.send(report(epoch(s, "a") - 1)) == []  # type: ignore[operator]
    assert s.queue("a") == "cpu"
    assert s.scheduler.num_stale == 1
    s.send(report(epoch(s, "a")))  # type: ignore[operator]
    assert s.queue("a") == "waiting"
    assert s.scheduler.num_stale == 1


def test_a_program_whose_copy_down_failed_recomputes_and_is_not_promoted() -> None:
    s = demoted_scene()
    s.send(ev.TransferFailed("a", epoch(s, "a"), ev.Direction.D2H))
    s.ask("a", 60)
    s.at(60.0).finish("b")
    out = s.release("b")
    assert forwarded(out) == ["a"]
    assert only(out, cmd.Promote) == []


def test_a_program_whose_copy_up_failed_keeps_its_place_and_recomputes() -> None:
    s = demoted_scene()
    s.ask("a", 60)
    s.at(60.0).finish("b")
    s.release("b")
    assert s.send(ev.TransferFailed("a", epoch(s, "a"), ev.Direction.H2D)) == []
    assert (s.queue("a"), s.running()) == ("gpu", {"a"})


def test_a_finished_copy_changes_no_place() -> None:
    s = demoted_scene()
    assert s.send(ev.TransferFinished("a", epoch(s, "a"), ev.Direction.D2H, 60)) == []
    assert s.queue("a") == "cpu"


def test_a_report_on_a_former_life_of_a_program_is_stale() -> None:
    s = demoted_scene()
    old_epoch = epoch(s, "a")
    s.release("a")
    s.at(60.0).finish("b")
    s.step("a", 40, 61.0, 62.0)
    assert epoch(s, "a") > old_epoch


@pytest.mark.parametrize("policy", ["mori", "elapsed", "lru"])
def test_epochs_rise_with_every_move_and_over_lives(policy: str) -> None:
    s = scene(policy)
    seen = [0]
    for life in range(3):
        s.step("a", 60, 200.0 * life, 200.0 * life + 1.0)
        seen.append(epoch(s, "a"))
        seen.append(only(s.release("a"), cmd.Drop)[0].epoch)
    assert all(before < after for before, after in pairwise(seen))


def test_labels_follow_the_queues() -> None:
    s = scene(hbm_tokens=100, dram_tokens=60)
    assert labels(s.ask("a", 60)) == {"a": "busy"}
    s.at(1.0).finish("a")
    assert labels(s.at(50.0).ask("b", 60)) == {"a": "idle", "b": "busy"}
    assert labels(residency(s, 0)) == {"a": "inactive"}


def test_a_program_that_never_had_a_place_gets_no_label() -> None:
    s = scene(hbm_tokens=100)
    s.ask("a", 90)
    assert only(s.ask("b", 90), cmd.SetLabel) == []


def test_no_iota_alone_changes_a_label() -> None:
    s = scene(hbm_tokens=100)
    s.step("a", 60, 0.0, 1.0)
    for now_s in range(10, 5000, 100):
        assert s.at(float(now_s)).tick() == []


def test_a_lost_worker_takes_every_copy_with_it_and_its_programs_start_elsewhere() -> None:
    s = demoted_scene()
    s.worker("v", 200)
    s.ask("a", 60)
    out = s.send(ev.WorkerDown("w"))
    assert [c.worker for c in only(out, cmd.Forward)] == ["v"]
    assert only(out, cmd.Promote) == []
    assert s.running() == {"a", "b"}, "b ends by an event of its own"
    s.cancel("b")
    assert [c.worker for c in only(s.ask("b", 60), cmd.Forward)] == ["v"]


def test_a_worker_that_comes_back_owes_nothing_to_the_requests_it_lost() -> None:
    s = demoted_scene()
    s.send(ev.WorkerDown("w"))
    s.worker("w", 100, 100)
    assert s.scheduler.workers["w"].num_running_requests == 0
    s.cancel("b")
    assert s.scheduler.workers["w"].num_running_requests == 0


def test_without_a_worker_requests_are_held_until_one_comes() -> None:
    s = scene(hbm_tokens=100)
    s.send(ev.WorkerDown("w"))
    assert only(s.ask("a", 10), cmd.Hold)
    assert forwarded(s.worker("v", 100)) == ["a"]


def test_the_cpu_queue_keeps_to_dram_when_a_held_prompt_has_grown() -> None:
    s = scene(hbm_tokens=100, dram_tokens=50)
    s.step("a", 45, 0.0, 1.0)
    s.at(20.0).ask("b", 90)
    assert s.queue("a") == "cpu"
    s.at(21.0).ask("a", 70)
    s.at(25.0).tick()
    assert s.scheduler.workers["w"].cpu.tokens <= 50


def test_the_cpu_queue_keeps_to_dram_when_a_shared_head_dissolves() -> None:
    s = scene(hbm_tokens=100, dram_tokens=60)
    for name in ("a", "b"):
        s.arrive(name, "g", 40)
        s.step(name, 50, s.now_s, s.now_s + 1.0)
    s.at(3.0).ask("c", 40)
    s.at(20.0).produce("c", 50)
    s.tick()
    assert s.queues() == {"a": "cpu", "b": "cpu", "c": "gpu"}
    s.send(ev.ProgramArrived("a"))
    s.tick()
    assert s.scheduler.workers["w"].cpu.tokens <= 60
