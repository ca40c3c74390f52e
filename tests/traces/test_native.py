"""The native format: it loses nothing, and reads plainer rows by stated rules."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import TraceError
from kvtier.traces import (
    GapKind,
    ProgramTrace,
    Step,
    ToolCall,
    Trace,
    build_trace,
    load,
    synth,
    write_native,
)


def read_rows(tmp_path: Path, *rows: str) -> Trace:
    file = tmp_path / "rows"
    file.write_text("\n".join(rows) + "\n")
    return load(file)


def row(at_ms: float, tokens: int, session: str = "p", extra: str = "") -> str:
    return (
        f'{{"timestamp":{at_ms},"input_length":{tokens},"output_length":10,'
        f'"session_id":"{session}"{extra}}}'
    )


spans_s = st.floats(0, 1e6, allow_nan=False)
names = st.text(min_size=1, max_size=8).filter(lambda s: s == s.encode("utf-8", "ignore").decode())
tools = st.builds(ToolCall, names, st.none() | spans_s)


@st.composite
def programs(draw: st.DrawFn, name: str, parents: list[str]) -> ProgramTrace:
    steps = []
    num_steps = draw(st.integers(1, 4))
    for index in range(num_steps):
        is_last = index == num_steps - 1
        context = draw(st.integers(1, 200_000))
        kinds = [GapKind.TOOL, GapKind.PROMPT, GapKind.COMPACT]
        steps.append(
            Step(
                context_tokens=context,
                output_tokens=draw(st.integers(0, 9_999)),
                reused_tokens=draw(st.integers(0, context)) if index else 0,
                gap_s=0.0 if is_last else draw(spans_s),
                gap_kind=GapKind.END if is_last else draw(st.sampled_from(kinds)),
                tools=tuple(draw(st.lists(tools, max_size=2))),
                reason_s=draw(st.none() | spans_s),
            )
        )
    group = draw(st.none() | names)
    head = draw(st.integers(0, steps[0].context_tokens)) if group is not None else 0
    parent = draw(st.none() | st.sampled_from(parents)) if parents else None
    start_s = draw(st.integers(0, 10**13)) / 1e6
    return ProgramTrace(name, tuple(steps), start_s, parent, group, head)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    found: list[ProgramTrace] = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        found.append(draw(programs(name, [p.program for p in found])))
    return build_trace("made", found, {}, "made")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_what_is_written_is_read_back_exactly(tmp_path, trace):
    write_native(trace, tmp_path / "t")
    again = load(tmp_path / "t")
    assert again.programs == trace.programs
    assert again.sha256 == trace.sha256
    assert again.warnings == {}


def test_published_transcripts_survive_the_round_trip(traces_dir, tmp_path):
    trace = load(traces_dir / "transcripts")
    write_native(trace, tmp_path / "t")
    assert load(tmp_path / "t").programs == trace.programs


def test_a_gap_without_delay_is_the_time_between_rows_less_the_model_time(tmp_path):
    trace = read_rows(tmp_path, row(0, 100, extra=',"reason":2'), row(5000, 200), row(9000, 300))
    steps = trace.programs[0].steps
    assert [(s.gap_s, s.gap_kind) for s in steps] == [
        (3.0, GapKind.TOOL),
        (4.0, GapKind.TOOL),
        (0.0, GapKind.END),
    ]


def test_reuse_that_is_not_given_follows_from_hashes_or_else_from_growth(tmp_path):
    hashed = read_rows(
        tmp_path,
        row(0, 1100, extra=',"hash_ids":[1,2,3]'),
        row(1, 2000, extra=',"hash_ids":[1,2,4,5]'),
    )
    grown = read_rows(tmp_path, row(0, 1100), row(1, 2000), row(2, 900))
    assert [s.reused_tokens for s in hashed.programs[0].steps] == [0, 1024]
    assert [s.reused_tokens for s in grown.programs[0].steps] == [0, 1110, 0]


def test_wall_clock_time_stamps_start_at_the_earliest(tmp_path):
    start_ms = 1_760_000_000_000
    trace = read_rows(tmp_path, row(start_ms + 2500, 100, "b"), row(start_ms, 100, "a"))
    assert [(p.program, p.start_s) for p in trace.programs] == [("a", 0.0), ("b", 2.5)]


def test_faults_of_rows_are_repaired_or_skipped_and_counted(tmp_path):
    trace = read_rows(
        tmp_path,
        row(5000, 100, extra=',"parent_id":"nobody","shared_group":"g","shared_tokens":101'),
        row(1000, 200, extra=',"gap_kind":"nap","reused":201,"reason":-1,"tools":[["a"]]'),
        row(2000, 0),
        '{"timestamp":1,"input_length":5,"output_length":5}',
    )
    assert trace.num_steps == 2
    assert trace.programs[0].steps[0].gap_s == 0.0
    assert trace.warnings == {
        "bad_reason": 1,
        "bad_reused": 1,
        "bad_row": 2,
        "bad_shared_tokens": 1,
        "bad_tool": 1,
        "gap_kind_unknown": 1,
        "parent_not_found": 1,
        "time_back": 1,
    }


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path):
    trace = synth("batch-react", 2, 0)
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    broken = Trace("made", (), {}, "0", "made")
    with pytest.raises(TraceError, match="no model call"):
        write_native(broken, target)
    with pytest.raises(TraceError, match="cannot be written"):
        write_native(trace, tmp_path / "no folder" / "out.jsonl")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
