"""MORI, who leaves HBM and where to (papers 1.3, design section 6)."""

from __future__ import annotations

from dataclasses import replace

from kvtier.scheduling import commands as cmd

from .scene import EXACT, Scene, demoted, labels, only, scene


def crowded(policy: str = "mori", *, dram_tokens: int = 100) -> Scene:
    """HBM of 100: `idle` and `busy` act with 30 each, `hog` runs with 40; the time is 100 s."""
    s = scene(policy, dram_tokens=dram_tokens)
    s.step("idle", 30, 0.0, 1.0)
    s.step("busy", 30, 1.0, 60.0)
    s.at(61.0).ask("hog", 40)
    return s.at(100.0)


def test_nobody_leaves_while_the_queue_fits() -> None:
    s = crowded()
    assert s.tick() == []
    assert s.queues() == {"idle": "gpu", "busy": "gpu", "hog": "gpu"}


def test_growth_past_hbm_demotes_the_idlest_acting_program_and_no_more_than_needed() -> None:
    s = crowded()
    s.produce("hog", 1)
    out = s.tick()
    assert demoted(out) == ["idle"]
    assert labels(out) == {"idle": "idle"}
    assert s.queues() == {"idle": "cpu", "busy": "gpu", "hog": "gpu"}


def test_acting_programs_leave_by_falling_iota() -> None:
    s = crowded()
    s.produce("hog", 50)
    assert demoted(s.tick()) == ["idle", "busy"]


def test_an_acting_program_leaves_before_a_running_one_of_higher_iota() -> None:
    s = scene()
    s.step("runner", 40, 0.0, 1.0)
    s.step("actor", 40, 1.0, 400.0)
    s.at(500.0).ask("runner", 40)
    iotas = {name: state.ring.value(500.0) for name, state in s.scheduler.programs.items()}
    assert iotas["runner"] > iotas["actor"]
    s.produce("runner", 30)
    assert demoted(s.tick()) == ["actor"]


def four_runners() -> Scene:
    """HBM of 100 filled by four running programs; `d` had the longest gap, then c, b, a."""
    s = scene()
    for name in "abcd":
        s.step(name, 25, 0.0, 10.0)
    for name, start_s in (("a", 11.0), ("b", 20.0), ("c", 40.0), ("d", 80.0)):
        s.at(start_s).ask(name, 25)
    return s.at(100.0)


def test_when_only_running_programs_remain_just_enough_are_marked_idlest_first() -> None:
    s = four_runners()
    s.produce("a", 20)
    assert s.tick() == []
    assert s.marked() == {"d"}
    assert s.running() == {"a", "b", "c", "d"}


def test_what_is_marked_counts_as_leaving_at_the_next_tick() -> None:
    s = four_runners()
    s.produce("a", 20)
    for now_s in (100.0, 105.0, 110.0):
        s.at(now_s).tick()
    assert s.marked() == {"d"}
    s.produce("a", 10)
    s.at(115.0).tick()
    assert s.marked() == {"c", "d"}


def test_a_marked_program_moves_when_its_inference_ends() -> None:
    s = four_runners()
    s.produce("a", 20)
    s.tick()
    out = s.at(120.0).finish("d", 30)
    assert demoted(out) == ["d"]
    assert s.queues() == {"a": "gpu", "b": "gpu", "c": "gpu", "d": "cpu"}


def test_a_marked_program_moves_when_its_inference_is_cancelled() -> None:
    s = four_runners()
    s.produce("a", 20)
    s.tick()
    assert demoted(s.at(120.0).cancel("d")) == ["d"]


def test_a_request_of_a_marked_program_is_held() -> None:
    s = four_runners()
    s.produce("a", 20)
    s.tick()
    assert only(s.at(101.0).ask("d", 25), cmd.Hold)


def test_without_dram_a_program_goes_to_waiting_and_is_not_copied() -> None:
    s = crowded(dram_tokens=0)
    s.produce("hog", 1)
    out = s.tick()
    assert demoted(out) == []
    assert labels(out) == {"idle": "inactive"}
    assert s.queues() == {"idle": "waiting", "busy": "gpu", "hog": "gpu"}


def test_a_full_cpu_queue_sends_its_idlest_to_waiting() -> None:
    s = crowded(dram_tokens=40)
    s.produce("hog", 1)
    s.tick()
    s.at(110.0).produce("hog", 40)
    out = s.tick()
    assert labels(out) == {"idle": "inactive", "busy": "idle"}
    assert s.queues() == {"idle": "waiting", "busy": "cpu", "hog": "gpu"}


def test_of_several_in_a_full_cpu_queue_only_the_idlest_go() -> None:
    s = scene(dram_tokens=60)
    for name, end_s in (("idlest", 1.0), ("idler", 10.0), ("newcomer", 60.0)):
        s.step(name, 30, s.now_s, end_s)
    s.at(61.0).ask("hog", 10)
    s.at(80.0).produce("hog", 60)
    assert demoted(s.tick()) == ["idlest", "idler"]
    s.at(90.0).produce("hog", 10)
    assert labels(s.tick()) == {"idlest": "inactive", "newcomer": "idle"}
    assert s.queues() == {"idlest": "waiting", "idler": "cpu", "newcomer": "cpu", "hog": "gpu"}


def test_a_full_cpu_queue_of_busier_programs_makes_the_newcomer_wait_itself() -> None:
    s = scene(dram_tokens=30)
    s.step("busy", 30, 0.0, 30.0)
    s.at(32.0).ask("hog", 40)
    s.at(40.0).produce("hog", 35)
    s.tick()
    assert s.queue("busy") == "cpu"
    s.step("idle", 20, 41.0, 41.1)
    s.at(100.0).produce("hog", 10)
    assert labels(s.tick()) == {"idle": "inactive"}
    assert s.queues() == {"busy": "cpu", "hog": "gpu", "idle": "waiting"}


def test_an_expired_program_loses_its_place_before_an_idler_one() -> None:
    s = scene(dram_tokens=30, settings=replace(EXACT, idle_expiry_s=300.0))
    s.step("expired", 15, 0.0, 200.0)
    s.step("idler", 15, 250.0, 250.1)
    s.at(251.0).ask("hog", 40)
    s.at(300.0).produce("hog", 60)
    s.tick()
    assert (s.queue("expired"), s.queue("idler")) == ("cpu", "cpu")
    s.at(301.0).finish("hog", 10)
    s.step("third", 15, 302.0, 303.0)
    s.at(304.0).ask("hog", 10)
    s.at(510.0).produce("hog", 80)
    iotas = {name: state.ring.value(510.0) for name, state in s.scheduler.programs.items()}
    assert iotas["idler"] > iotas["expired"]
    s.tick()
    assert s.queue("expired") == "waiting"
    assert (s.queue("idler"), s.queue("third")) == ("cpu", "cpu")


def test_an_expired_program_goes_even_for_a_newcomer_of_higher_iota() -> None:
    s = scene(dram_tokens=30, settings=replace(EXACT, idle_expiry_s=300.0))
    s.step("expired", 30, 0.0, 200.0)
    s.at(201.0).ask("hog", 40)
    s.at(220.0).produce("hog", 35)
    s.tick()
    assert s.queue("expired") == "cpu"
    s.step("idler", 20, 401.0, 401.1)
    s.at(600.0).produce("hog", 10)
    s.tick()
    assert s.queues() == {"expired": "waiting", "hog": "gpu", "idler": "cpu"}


def test_elapsed_ranks_by_the_age_of_the_gap_and_mori_by_its_share() -> None:
    left = {}
    for policy in ("mori", "elapsed"):
        s = scene(policy)
        s.step("idle", 30, 0.0, 1.0)
        s.step("long_gap", 30, 1.0, 81.0)
        s.step("idle", 30, 100.0, 101.0)
        s.at(102.0).ask("hog", 40)
        s.at(120.0).produce("hog", 1)
        left[policy] = demoted(s.tick())
    assert left == {"mori": ["idle"], "elapsed": ["long_gap"]}


def test_the_only_program_may_use_all_of_hbm_and_is_not_marked_below_it() -> None:
    s = scene(settings=replace(EXACT, hbm_headroom=0.2))
    s.ask("a", 95)
    s.produce("a", 5)
    s.tick()
    assert s.marked() == set()
    s.produce("a", 1)
    s.tick()
    assert s.marked() == {"a"}
