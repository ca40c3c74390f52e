"""From recorded programs to plans: gaps, compaction, children, and the order of runs."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sim.workload import Gaps, Plan, fit_steps, instances, plan_programs
from kvtier.traces import GapKind, ProgramTrace, Step

from .traces import program, trace_of

CAP_S = 60.0
LIMIT = 10_000


def gap_of(kind: GapKind, gap_s: float, gaps: Gaps) -> float:
    steps, _ = fit_steps(program("p", [10, 100], gap_s=gap_s, kind=kind), LIMIT, gaps, CAP_S)
    return steps[0].gap_s


@pytest.mark.parametrize(
    ("kind", "gap_s", "raw", "capped", "tool"),
    [
        (GapKind.TOOL, 5.0, 5.0, 5.0, 5.0),
        (GapKind.TOOL, 500.0, 500.0, 60.0, 500.0),
        (GapKind.PROMPT, 5.0, 5.0, 5.0, 0.0),
        (GapKind.PROMPT, 7200.0, 7200.0, 60.0, 0.0),
        (GapKind.COMPACT, 90.0, 90.0, 60.0, 90.0),
    ],
)
def test_gaps_are_replayed_as_recorded_capped_or_without_people(
    kind: GapKind, gap_s: float, raw: float, capped: float, tool: float
) -> None:
    measured = [gap_of(kind, gap_s, gaps) for gaps in (Gaps.RAW, Gaps.CAPPED, Gaps.TOOL)]
    assert measured == [raw, capped, tool]


def test_programs_that_fit_are_replayed_as_recorded() -> None:
    steps, compactions = fit_steps(program("p", [100, 200, 300]), LIMIT, Gaps.RAW, CAP_S)
    assert compactions == 0
    assert [s.context_tokens for s in steps] == [100, 200, 300]
    assert [s.reused_tokens for s in steps] == [0, 150, 250]
    assert [s.tool for s in steps] == ["bash", "bash", None]


def test_a_prompt_that_does_not_fit_restarts_at_the_first_size_and_grows_as_recorded() -> None:
    contexts = [1000, 5000, 9000, 12_000, 13_000, 17_000, 21_500]
    recorded = program("p", contexts, group="g", shared=300)
    steps, compactions = fit_steps(recorded, LIMIT, Gaps.RAW, CAP_S)
    # 12,000 does not fit: back to 1,000, then + 1,000 and + 4,000; + 4,500 does not fit again.
    assert [s.context_tokens for s in steps] == [1000, 5000, 9000, 1000, 2000, 6000, 1000]
    assert [s.reused_tokens for s in steps] == [0, 1050, 5050, 300, 1050, 2050, 300]
    assert compactions == 2


def test_a_recorded_shrink_ends_the_offset() -> None:
    steps, compactions = fit_steps(
        program("p", [2000, 11_000, 12_000, 500, 1500]), LIMIT, Gaps.RAW, CAP_S
    )
    assert [s.context_tokens for s in steps] == [2000, 2000, 3000, 500, 1500]
    assert compactions == 1


STEP = st.tuples(st.integers(1, 300), st.integers(0, 150), st.integers(0, 100), st.booleans())


@given(st.lists(STEP, min_size=1, max_size=25), st.integers(0, 50), st.integers(20, 250))
def test_every_step_fits_the_limit_and_reuses_what_the_step_before_left(
    drawn: list[tuple[int, int, int, bool]], shared: int, limit: int
) -> None:
    steps, context = [], 0
    for index, (tokens, output, share, restart) in enumerate(drawn):
        context = tokens if restart or not index else context + tokens
        last = index == len(drawn) - 1
        kind = GapKind.END if last else GapKind.TOOL
        reused = context * share // 100 if index else 0
        steps.append(Step(context, output, reused, 0.0, kind))
    shared = min(shared, steps[0].context_tokens)
    recorded = ProgramTrace("p", tuple(steps), 0.0, None, "g", shared)
    fitted, compactions = fit_steps(recorded, limit, Gaps.RAW, CAP_S)
    assert len(fitted) == len(steps)
    previous_end = 0
    for step in fitted:
        assert step.context_tokens >= 1
        assert step.output_tokens >= 1
        assert step.context_tokens + step.output_tokens <= limit
        assert 0 <= step.reused_tokens <= min(previous_end, step.context_tokens)
        previous_end = step.context_tokens + step.output_tokens
    outputs = [min(max(s.output_tokens, 1), limit // 2) for s in steps]
    assert [s.output_tokens for s in fitted] == outputs
    fits = all(s.context_tokens + o <= limit for s, o in zip(steps, outputs, strict=True))
    assert (compactions == 0) == fits
    if fits:
        assert [s.context_tokens for s in fitted] == [s.context_tokens for s in steps]


# Children and heads ------------------------------------------------------------------------


def test_a_child_starts_after_the_step_that_was_the_last_to_end_before_it() -> None:
    # Calls end at 2, 7 and 12 s.
    parent = program("p", [100, 200, 300], gap_s=3.0, reason_s=2.0)
    times = {"early": 1.0, "first": 2.5, "between": 6.9, "second": 7.0, "late": 99.0}
    children = [program(n, [50], start_s=t, parent="p") for n, t in times.items()]
    (plan,) = plan_programs(trace_of(parent, *children), LIMIT, Gaps.RAW, CAP_S)
    starts = {child.name: after for after, child in plan.children}
    assert starts == {"early": 0, "first": 0, "between": 0, "second": 1, "late": 2}


def test_children_have_children_and_are_no_plans_of_their_own() -> None:
    trace = trace_of(
        program("p", [100, 200]),
        program("c", [50, 60], parent="p"),
        program("g", [20], parent="c"),
        program("other", [10]),
    )
    plans = plan_programs(trace, LIMIT, Gaps.RAW, CAP_S)
    assert sorted(plan.name for plan in plans) == ["other", "p"]
    parent = next(plan for plan in plans if plan.name == "p")
    ((_, child),) = parent.children
    ((_, grandchild),) = child.children
    assert (child.name, grandchild.name) == ("c", "g")


def test_programs_of_one_group_use_as_much_of_its_head_as_they_have() -> None:
    trace = trace_of(
        program("a", [100, 200], group="g", shared=40),
        program("b", [100, 200], group="g", shared=60),
        program("c", [100, 200]),
    )
    plans = {p.name: p for p in plan_programs(trace, LIMIT, Gaps.RAW, CAP_S)}
    assert plans["a"].group == plans["b"].group == "g"
    assert (plans["a"].head_tokens, plans["b"].head_tokens) == (40, 60)
    assert (plans["c"].group, plans["c"].head_tokens) == (None, 0)


def test_a_head_leaves_every_prompt_at_least_one_token_of_its_own() -> None:
    trace = trace_of(program("a", [100, 30], group="g", shared=80))
    (plan,) = plan_programs(trace, LIMIT, Gaps.RAW, CAP_S)
    assert plan.head_tokens == 29


# Order -------------------------------------------------------------------------------------


def _plans(num: int) -> tuple[Plan, ...]:
    names = [f"p{i}" for i in range(num)]
    return plan_programs(trace_of(*(program(n, [10]) for n in names)), LIMIT, Gaps.RAW, CAP_S)


def test_every_plan_runs_once_a_round_under_a_new_name() -> None:
    plans = _plans(7)
    runs = list(islice(instances(plans, seed=3), 21))
    rounds = [[run.plan.name for run in runs[i : i + 7]] for i in (0, 7, 14)]
    assert all(sorted(names) == sorted(p.name for p in plans) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert len({run.program for run in runs}) == 21


def test_the_seed_fixes_the_order() -> None:
    def order(seed: int) -> list[str]:
        return [run.program for run in islice(instances(_plans(9), seed), 27)]

    assert order(1) == order(1)
    assert order(1) != order(2)
