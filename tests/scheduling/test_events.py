"""Contradicting events, endings, clocks: what `handle` takes and what it refuses."""

from __future__ import annotations

import pytest

from kvtier.errors import EventError
from kvtier.scheduling import POLICIES, Scheduler
from kvtier.scheduling import commands as cmd
from kvtier.scheduling import events as ev

from .scene import Scene, demoted, forwarded, only, scene

POLICY_NAMES = sorted(POLICIES)


def snapshot(scheduler: Scheduler) -> object:
    """Everything about programs and workers that a later decision may read."""
    programs = []
    for s in scheduler.programs.values():
        place = (s.program, s.queue, s.worker, s.tokens, s.shared_tokens, s.marked, s.epoch)
        life = (s.num_steps, s.moved_s, list(s.held), list(s.running), s.tool, s.ring.value(1e6))
        programs.append((place, life))
    workers = [
        (w.worker, w.staying.tokens, w.leaving.tokens, w.cpu.tokens, w.num_running_requests)
        for w in scheduler.workers.values()
    ]
    return programs, workers, scheduler.num_stale


CONTRADICTIONS = {
    "request twice": ev.RequestArrived("a", "held", 10),
    "request of another program": ev.RequestArrived("new", "running", 10),
    "forwarded, unknown": ev.RequestForwarded("b", "never"),
    "forwarded, unknown program": ev.RequestForwarded("never", "running"),
    "forwarded, but held": ev.RequestForwarded("a", "held"),
    "tokens, unknown": ev.TokensProduced("b", "never", 5),
    "tokens, but held": ev.TokensProduced("a", "held", 5),
    "finished, unknown": ev.RequestFinished("b", "never", 10),
    "finished, but held": ev.RequestFinished("a", "held", 10),
    "finished, of another": ev.RequestFinished("a", "running", 10),
    "finished twice": ev.RequestFinished("b", "done", 10),
    "cancelled, unknown": ev.RequestCancelled("b", "never"),
    "cancelled, of another": ev.RequestCancelled("a", "running"),
    "cancelled after its end": ev.RequestCancelled("b", "done"),
    "worker up twice": ev.WorkerUp("w", 500),
    "worker never up": ev.WorkerDown("v"),
    "stats of no worker": ev.EngineStats("v", 1, 10, 1, 1),
}


@pytest.mark.parametrize("policy", ["lru", "mori"])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradicting_event_is_refused_with_nothing_changed(policy: str, case: str) -> None:
    s = scene(policy, "request-cap:1")
    s.send(ev.RequestArrived("b", "done", 30))
    s.at(1.0).send(ev.RequestFinished("b", "done", 30))
    s.at(2.0).send(ev.RequestArrived("b", "running", 30))
    s.send(ev.RequestArrived("a", "held", 20))
    before = snapshot(s.scheduler)
    with pytest.raises(EventError) as refusal:
        s.scheduler.handle(CONTRADICTIONS[case], 2.0)
    assert "\n" not in str(refusal.value)
    assert snapshot(s.scheduler) == before
    s.scheduler.check_integrity()
    assert forwarded(s.at(3.0).send(ev.RequestFinished("b", "running", 30))) == ["a"]


@pytest.mark.parametrize(
    "event",
    [
        ev.RequestArrived("a", "r", -5),
        ev.WorkerUp("v", 0),
        ev.WorkerUp("v", 100, -1),
        ev.ProgramArrived("a", None, "g", -1),
        ev.EngineStats("w", 1, 0, 1, 1),
        ev.TokensProduced("b", "running", -50),
        ev.RequestFinished("b", "running", -1),
        ev.Residency("b", 1, -1, 0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_number_that_cannot_be_is_refused_with_nothing_changed(event: ev.Event) -> None:
    s = scene()
    s.send(ev.RequestArrived("b", "running", 30))
    before = snapshot(s.scheduler)
    with pytest.raises(EventError):
        s.scheduler.handle(event, 0.0)
    assert snapshot(s.scheduler) == before


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_released_program_gives_everything_back(policy: str) -> None:
    s = scene(policy)
    s.step("a", 60, 0.0, 1.0)
    assert only(s.release("a"), cmd.Drop)
    assert s.scheduler.programs == {}
    assert s.scheduler.workers["w"].staying.tokens == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_program_released_in_mid_inference_goes_when_the_inference_ends(policy: str) -> None:
    s = scene(policy)
    s.ask("a", 60)
    assert s.release("a") == []
    assert s.running() == {"a"}
    assert only(s.at(1.0).finish("a"), cmd.Drop)
    assert s.scheduler.programs == {}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_held_requests_of_a_released_program_are_rejected(policy: str) -> None:
    s = scene(policy, "request-cap:1")
    s.ask("a", 60)
    s.ask("b", 20)
    assert [c.program for c in only(s.release("b"), cmd.Reject)] == ["b"]
    assert forwarded(s.at(1.0).finish("a")) == []


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_request_that_follows_a_release_in_mid_inference_still_ends(policy: str) -> None:
    s = scene(policy, "request-cap:1")
    s.send(ev.RequestArrived("a", "first", 10))
    s.release("a")
    answer = s.send(ev.RequestArrived("a", "second", 10))
    later = s.at(1.0).send(ev.RequestFinished("a", "first", 12))
    endings = only(answer + later, cmd.Reject) + only(answer + later, cmd.Forward)
    assert [c.request for c in endings] == ["second"]


def test_a_refused_request_does_not_revive_a_released_program() -> None:
    s = scene(hbm_tokens=100)
    s.send(ev.RequestArrived("a", "first", 10))
    s.release("a")
    assert only(s.send(ev.RequestArrived("a", "second", 101)), cmd.Reject)
    assert only(s.at(1.0).send(ev.RequestFinished("a", "first", 12)), cmd.Drop)
    assert s.scheduler.programs == {}


def test_a_program_without_an_arrival_arrives_by_its_request() -> None:
    s = scene()
    assert forwarded(s.ask("a", 10)) == ["a"]


def test_reports_on_unknown_programs_are_counted_and_have_no_effect() -> None:
    s = scene()
    for event in (
        ev.ProgramReleased("never"),
        ev.ToolCalled("never", "bash"),
        ev.Residency("never", 0, 0, 0),
        ev.TransferFinished("never", 0, ev.Direction.D2H, 1),
    ):
        assert s.send(event) == []
    assert s.scheduler.num_stale == 4
    assert s.scheduler.programs == {}


# Idleness as the scheduler feeds it --------------------------------------------------------


def iota(s: Scene, program: str, now_s: float) -> float:
    return s.scheduler.programs[program].ring.value(now_s)


@pytest.mark.parametrize("held_s", [0.0, 1.0, 500.0])
def test_time_held_in_the_gateway_never_changes_iota(held_s: float) -> None:
    s = scene("mori", "request-cap:1")
    s.step("a", 10, 0.0, 10.0)
    s.at(15.0).ask("b", 10)
    s.at(20.0).ask("a", 10)
    assert s.held() == {"a"}
    assert iota(s, "a", 20.0) == iota(s, "a", 20.0 + held_s) == 0.5
    s.at(20.0 + held_s).finish("b")
    assert s.running() == {"a"}
    s.at(30.0 + held_s).finish("a")
    assert iota(s, "a", 30.0 + held_s) == pytest.approx(10 / 30), "10 s more of reasoning"


def test_time_held_for_a_marked_program_is_no_gap_after_its_inference() -> None:
    s = scene(hbm_tokens=100, dram_tokens=200)
    s.ask("a", 60)
    s.send(ev.RequestArrived("b", "b/first", 40))
    s.at(10.0).produce("a", 30)
    s.tick()
    assert len(s.marked()) == 1
    marked = s.marked().pop()
    running = next(iter(s.scheduler.programs[marked].running))
    assert only(s.at(11.0).send(ev.RequestArrived(marked, "next", 40)), cmd.Hold)
    s.at(20.0).send(ev.RequestFinished(marked, running, 60))
    assert s.held() == {marked}
    assert iota(s, marked, 20.0) == iota(s, marked, 900.0) == 0.0


def test_after_a_cancelled_request_the_program_acts_and_grows_idle() -> None:
    s = scene()
    s.step("a", 60, 0.0, 10.0)
    s.at(20.0).ask("a", 60)
    s.at(30.0).cancel("a")
    assert iota(s, "a", 30.0) < iota(s, "a", 300.0)
    assert iota(s, "a", 1e6) > 0.99


def test_after_a_cancelled_held_request_the_gap_runs_again() -> None:
    s = scene("mori", "request-cap:1")
    s.step("a", 10, 0.0, 10.0)
    s.at(15.0).ask("b", 10)
    s.at(20.0).ask("a", 10)
    s.at(70.0).cancel("a")
    assert iota(s, "a", 70.0) == 0.5
    assert iota(s, "a", 100.0) == pytest.approx(40 / 50)


def test_a_client_that_left_does_not_keep_its_place_from_others() -> None:
    s = scene("elapsed")
    s.step("gone", 60, 0.0, 1.0)
    s.at(2.0).ask("gone", 60)
    s.at(3.0).cancel("gone")
    assert forwarded(s.at(100.0).ask("b", 60)) == ["b"]


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, -0.2])
def test_a_clock_step_leaves_order_and_bounds_alone(step_s: float) -> None:
    s = scene()
    s.step("idle", 30, 0.0, 1.0)
    s.step("busy", 30, 1.0, 60.0)
    s.at(61.0).ask("hog", 40)
    s.at(100.0).tick()
    s.at(100.0 + step_s).produce("hog", 1)
    assert demoted(s.tick()) == ["idle"]
    for name in s.scheduler.programs:
        assert 0.0 <= iota(s, name, s.now_s) <= 1.0


def test_a_time_before_the_latest_counts_as_the_latest() -> None:
    steady, stepped = scene(), scene()
    for s, back_s in ((steady, 0.0), (stepped, 3600.0)):
        s.step("a", 60, 0.0, 10.0)
        s.at(100.0).tick()
        s.at(100.0 - back_s).ask("b", 60)
    assert steady.queues() == stepped.queues() == {"a": "cpu", "b": "gpu"}
