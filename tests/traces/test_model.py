"""The model's rules, the digest and the summary."""

import json

import msgspec
import pytest

from kvtier.errors import TraceError
from kvtier.traces import GapKind, ProgramTrace, Step, Trace, build_trace, check, summarize


def step(context: int = 100, *, gap_s: float = 1.0, kind: GapKind = GapKind.TOOL, **more) -> Step:
    return Step(context, 10, 0, gap_s, kind, **more)


END = step(gap_s=0.0, kind=GapKind.END)


def program(*steps: Step, name: str = "p", start_s: float = 0.0, **more) -> ProgramTrace:
    return ProgramTrace(name, steps or (END,), start_s, **more)


def build(*programs: ProgramTrace) -> Trace:
    return build_trace("made", programs, {}, "made")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (program(step(0), END), "context_tokens=0"),
        (program(msgspec.structs.replace(step(), output_tokens=-1), END), "output_tokens=-1"),
        (program(msgspec.structs.replace(step(), reused_tokens=1), END), "reused_tokens=1"),
        (program(step(gap_s=-0.1), END), "gap_s=-0.1"),
        (program(step(gap_s=float("inf")), END), "gap_s=inf"),
        (program(step(reason_s=float("nan")), END), "reason_s=nan"),
        (program(step()), "must be 'end' in the last step"),
        (program(END, END), "must be 'end' in the last step"),
        (program(step(gap_s=2.0, kind=GapKind.END)), "gap_s=2.0 must be 0"),
        (program(start_s=-1.0), "start_s=-1.0"),
        (program(start_s=1e-7), "finer than a microsecond"),
        (program(parent="p"), "parent 'p'"),
        (program(parent="nobody"), "parent 'nobody'"),
        (program(shared_tokens=1), "shared_tokens=1"),
        (program(shared_group="g", shared_tokens=101), "shared_tokens=101"),
        (ProgramTrace("p", (), 0.0), "has no step"),
    ],
)
def test_a_broken_rule_is_named_with_its_program(broken, words):
    trace = Trace("made", (broken,), {}, "0", "made")
    with pytest.raises(TraceError, match="program 'p'") as caught:
        check(trace)
    assert words in str(caught.value)


def test_two_programs_of_one_name_are_refused():
    with pytest.raises(TraceError, match="one name"):
        build(program(), program())


def test_programs_are_ordered_by_arrival_then_name():
    trace = build(program(name="c", start_s=2.0), program(name="b"), program(name="a"))
    assert [p.program for p in trace.programs] == ["a", "b", "c"]


def test_the_digest_depends_on_the_programs_alone():
    one = build_trace("x", [program(name="a"), program(name="b")], {"bad_line": 1}, "f")
    two = build_trace("y", [program(name="b"), program(name="a")], {}, "g")
    other = build_trace("x", [program(name="a"), program(name="c")], {}, "f")
    assert one.sha256 == two.sha256
    assert one.sha256 != other.sha256


def test_the_summary_counts_and_pools():
    trace = build_trace(
        "made",
        [
            program(step(gap_s=3.0, reason_s=1.0), step(kind=GapKind.PROMPT), END, name="a"),
            program(step(200, gap_s=0.0, kind=GapKind.END, reason_s=2.0), name="b", parent="a"),
        ],
        {"bad_line": 2, "torn_last_line": 0},
        "made",
    )
    summary = summarize(trace)
    assert (summary["programs"], summary["subagents"], summary["steps"]) == (2, 1, 4)
    assert summary["pooled_idleness"] == 0.5  # 3 s of gaps beside 3 s of recorded model time
    assert summary["gap_kinds"] == {"tool": 1, "prompt": 1, "compact": 0, "end": 2}
    assert summary["context_tokens"] == {"p10": 100, "p50": 100, "p90": 200, "max": 200}
    assert summary["gap_s"] == {"p10": 1.0, "p50": 1.0, "p90": 3.0, "max": 3.0}
    assert summary["warnings"] == {"bad_line": 2}
    assert json.loads(json.dumps(summary)) == summary


def test_idleness_is_none_when_no_model_time_was_recorded():
    assert summarize(build(program(step(), END)))["pooled_idleness"] is None
