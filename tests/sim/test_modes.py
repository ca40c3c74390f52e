"""Closed loop, batch and open loop: who starts when, and when a run is over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtier.errors import CapacityError, UnknownNameError
from kvtier.scheduling import events as ev
from kvtier.sim import Gaps, Mode, SimSettings, simulate
from kvtier.traces import GapKind, Trace, synth

from .simulation import Watched, check_all_requests_are_somewhere
from .traces import MODEL, gpu_with, program, trace_of


def settings(**changes: object) -> SimSettings:
    base = SimSettings(
        policy="lru",
        model=MODEL,
        gpu=gpu_with(100_000),
        num_programs=4,
        duration_s=120.0,
        ramp_s=10.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def short_programs(num: int = 6) -> Trace:
    return trace_of(*(program(f"p{i}", [1000, 1500, 2000 + 100 * i]) for i in range(num)))


# Closed loop -------------------------------------------------------------------------------


def test_a_closed_loop_keeps_its_number_of_programs() -> None:
    def check(watched: Watched, now_s: float) -> None:
        recorder = watched.recorder
        if now_s >= 10.0:
            assert recorder.programs - recorder.programs_ended == 4

    watched = Watched(short_programs(), settings(), [check]).run()
    assert watched.num_ticks == 24
    assert watched.recorder.programs_ended > 40


def test_the_slots_of_a_closed_loop_open_evenly_over_the_ramp() -> None:
    watched = Watched(trace_of(program("p", [1000, 2000], gap_s=50.0)), settings()).run()
    starts = [t for t, _ in watched.told(ev.ProgramArrived)]
    assert starts[:4] == pytest.approx([0.0, 2.5, 5.0, 7.5])


def test_a_closed_run_lasts_as_long_as_it_was_asked_to() -> None:
    record = simulate(short_programs(), settings())
    assert record["simulated_s"] == 120.0
    assert record["makespan_s"] is None


def test_sub_agents_come_on_top_of_the_slots() -> None:
    trace = trace_of(program("p", [1000, 1500], gap_s=5.0), program("c", [500, 600], parent="p"))
    watched = Watched(trace, settings(num_programs=1), [check_all_requests_are_somewhere]).run()
    arrived = [(t, e) for t, e in watched.told(ev.ProgramArrived)]
    children = [(t, e) for t, e in arrived if e.parent is not None]
    names = {e.program for _, e in children}
    released = [e.program for _, e in watched.told(ev.ProgramReleased)]
    parents_ended = sum(name not in names for name in released)
    assert len(arrived) - len(children) - parents_ended == 1
    assert len(children) == watched.recorder.subagents > 3
    finished = [
        t for t, e in watched.told(ev.RequestFinished) if e.program == children[0][1].parent
    ]
    assert children[0][0] == finished[0]


# Batch -------------------------------------------------------------------------------------


def test_a_batch_ends_when_its_last_program_has_ended() -> None:
    watched = Watched(short_programs(), settings(mode=Mode.BATCH, num_programs=10)).run()
    released = [t for t, _ in watched.told(ev.ProgramReleased)]
    assert len(released) == 10
    assert watched.recorder.end_s == max(released)
    assert {t for t, e in watched.told(ev.ProgramArrived)} == {0.0}


def test_a_batch_reports_its_time_as_makespan_and_ignores_the_duration() -> None:
    record = simulate(
        short_programs(), settings(mode=Mode.BATCH, num_programs=10, duration_s=0.001)
    )
    assert record["makespan_s"] == record["simulated_s"] > 2.0
    assert record["programs_started"] == record["programs_ended"] == 10
    assert record["steps"] == 30
    assert record["output_tokens"] == 30 * 50
    assert record["num_unanswered"] == 0
    assert record["output_tok_per_s"] == pytest.approx(1500 / record["makespan_s"])


def test_a_batch_waits_for_the_sub_agents_of_its_last_step() -> None:
    trace = trace_of(
        program("p", [1000, 1100]), program("c", [500] * 5, start_s=99.0, parent="p", gap_s=30.0)
    )
    record = simulate(trace, settings(mode=Mode.BATCH, num_programs=1))
    assert record["programs_ended"] == 2
    assert record["makespan_s"] > 120.0


# Open loop ---------------------------------------------------------------------------------


def test_an_open_loop_starts_each_program_at_its_recorded_time_once() -> None:
    trace = trace_of(*(program(f"p{i}", [1000, 1500], start_s=7.5 * i) for i in range(5)))
    watched = Watched(trace, settings(mode=Mode.OPEN, num_programs=99)).run()
    assert [t for t, _ in watched.told(ev.ProgramArrived)] == [7.5 * i for i in range(5)]
    assert watched.recorder.end_s < 40.0


def test_an_open_loop_is_cut_at_the_duration() -> None:
    trace = trace_of(*(program(f"p{i}", [1000, 1500], start_s=7.5 * i) for i in range(5)))
    record = simulate(trace, settings(mode=Mode.OPEN, duration_s=10.0))
    assert record["simulated_s"] == 10.0
    assert record["programs_started"] == 2


# Endings -----------------------------------------------------------------------------------


def test_a_request_without_a_first_token_counts_at_its_age() -> None:
    record = simulate(
        trace_of(program("p", [90_000, 95_000])),
        settings(num_programs=1, duration_s=1.0, gpu=gpu_with(100_000)),
    )
    assert record["steps"] == 0
    assert record["num_unanswered"] == 1
    assert record["ttft_p50_s"] == record["ttft_p99_s"] == 1.0


def test_an_interrupt_leaves_a_partial_record() -> None:
    def stop(now_s: float, num_ended: int) -> None:
        del num_ended
        if now_s >= 50.0:
            raise KeyboardInterrupt

    record = simulate(short_programs(), settings(), stop)
    assert record["partial"]
    assert record["simulated_s"] == 50.0
    assert record["output_tokens"] > 0
    assert not simulate(short_programs(), settings())["partial"]


@pytest.mark.parametrize("method", ["open", "publish", "close", "begin_steps"])
def test_an_interrupt_in_the_middle_of_a_step_leaves_a_partial_record(method: str) -> None:
    watched = Watched(short_programs(), settings())
    calls = 0

    def arm(name: str) -> None:
        cache = watched.simulation.engines["w0"].cache
        original = getattr(cache, name)

        def interrupted(*args: object) -> object:
            nonlocal calls
            calls += 1
            result = original(*args)
            if calls == 20:
                raise KeyboardInterrupt
            return result

        setattr(cache, name, interrupted)

    watched.simulation.heap.at(1.0, lambda now_s: arm(method))
    watched.run()
    assert watched.recorder.partial
    assert 1.0 < watched.recorder.end_s < 120.0


def test_progress_is_told_once_a_tick_and_never_runs_backwards() -> None:
    seen: list[tuple[float, int]] = []
    simulate(short_programs(), settings(), lambda now_s, ended: seen.append((now_s, ended)))
    assert [t for t, _ in seen] == [5.0 * i for i in range(1, 25)]
    assert [ended for _, ended in seen] == sorted(ended for _, ended in seen)


# Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lru+offload", "mori"])
def test_a_program_larger_than_hbm_is_rejected_and_its_slot_goes_on(policy: str) -> None:
    trace = trace_of(
        program("large", [500, 120_000, 121_000]), *(program(f"p{i}", [1000, 2000]) for i in (1, 2))
    )
    watched = Watched(trace, settings(policy=policy), [check_all_requests_are_somewhere]).run()
    recorder = watched.recorder
    assert recorder.rejected > 3
    assert recorder.steps > 40
    alive = recorder.programs - recorder.programs_ended
    assert alive == 4
    last = [t for t, e in watched.told(ev.RequestFinished)]
    assert max(last) > 110.0


def test_a_trace_of_which_nothing_fits_is_refused_at_once() -> None:
    with pytest.raises(CapacityError, match="larger GPU"):
        simulate(trace_of(program("large", [120_000, 121_000])), settings())


@pytest.mark.parametrize("policy", ["lru", "mori"])
def test_a_run_whose_programs_nearly_all_are_too_large_still_ends(policy: str) -> None:
    trace = trace_of(program("small", [10]), *(program(f"l{i}", [120_000]) for i in range(5)))
    record = simulate(trace, settings(policy=policy))
    assert record["simulated_s"] == 120.0
    assert record["rejected_requests"] > 10


def test_a_batch_of_which_some_are_rejected_still_ends() -> None:
    trace = trace_of(program("large", [120_000]), program("small", [1000, 2000]))
    record = simulate(trace, settings(mode=Mode.BATCH, num_programs=6))
    assert record["programs_ended"] == 6
    assert record["rejected_requests"] == 3
    assert math.isfinite(record["makespan_s"])


def test_unknown_policies_and_admissions_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mori'"):
        simulate(short_programs(), settings(policy="morii"))
    with pytest.raises(UnknownNameError, match="admission"):
        simulate(short_programs(), settings(admission="concurr"))


def test_a_model_larger_than_the_gpu_is_refused() -> None:
    small = replace(gpu_with(1000), hbm_bytes=10**9)
    with pytest.raises(CapacityError):
        simulate(short_programs(), settings(gpu=small))


def test_the_built_in_profiles_run_in_every_mode() -> None:
    trace = synth("batch-react", 5, 0)
    for mode in Mode:
        record = simulate(trace, settings(mode=mode, num_programs=5, duration_s=60.0))
        assert record["steps"] > 0
        assert record["simulated"]


def test_a_batch_waits_out_gaps_of_many_hours() -> None:
    trace = trace_of(program("p", [1000, 1500, 2000], gap_s=30_000.0, kind=GapKind.PROMPT))
    record = simulate(trace, settings(mode=Mode.BATCH, num_programs=2, gaps=Gaps.RAW))
    assert record["programs_ended"] == 2
    assert record["makespan_s"] > 60_000.0


@pytest.mark.parametrize("policy", ["lru", "mori"])
def test_a_program_with_a_shorter_head_than_its_group_ends_although_the_head_is_long(
    policy: str,
) -> None:
    trace = trace_of(
        program("long", [6100, 6200], group="g", shared=6000),
        program("short", [5000, 9500, 9600], group="g", shared=2000),
    )
    changed = settings(policy=policy, mode=Mode.BATCH, num_programs=2, gpu=gpu_with(10_000))
    record = simulate(trace, changed)
    assert record["programs_ended"] == 2
