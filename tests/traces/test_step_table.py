"""The step table: contexts from the three counts, outputs from characters only."""

import json

from kvtier.traces import GapKind, ToolCall, load


def call(context: int, **more: object) -> dict[str, object]:
    base = {"t": 0.0, "reason": 1.5, "act": 2.5, "next": "tool", "in": 1, "cw": context - 3}
    return base | {"cr": 2, "out_reported": 9_999, "out_chars": 350, "tools": []} | more


def read(tmp_path, *sessions):
    rows = [{"session": f"s{i}", "versions": ["2.1.7"], "steps": s} for i, s in enumerate(sessions)]
    (tmp_path / "t").write_text("\n".join(json.dumps(row) for row in rows))
    return load(tmp_path / "t")


def test_a_step_carries_context_output_gap_and_tools(tmp_path):
    last = call(50_000, act=None, next=None, out_chars=0)
    trace = read(tmp_path, [call(40_000, tools=[["Bash", 2.0], ["Task", None]]), last])
    first, end = trace.programs[0].steps
    assert (first.context_tokens, first.output_tokens, first.gap_s) == (40_000, 100, 2.5)
    assert first.tools == (ToolCall("Bash", 2.0), ToolCall("Task", None))
    assert (end.gap_kind, end.gap_s, end.output_tokens) == (GapKind.END, 0.0, 1)
    assert end.reused_tokens == 40_100
    assert trace.warnings == {"tool_without_result": 1}


def test_a_compaction_keeps_the_head_alone(tmp_path):
    end = call(60_000, act=None, next=None)
    trace = read(tmp_path, [call(50_000, next="compact"), end])
    assert trace.programs[0].steps[1].reused_tokens == 15_000


def test_faults_are_counted(tmp_path):
    bad = call(50_000, cw=-1)
    odd = call(50_000, act=-2.0, next="nap", reason=None, tools=[["x"]])
    late = call(50_000, act=None)
    trace = read(tmp_path, [bad, odd, late, call(50_100, next=None)], [], [bad])
    assert trace.num_steps == 3
    assert trace.warnings == {
        "bad_tool": 1,
        "call_without_usage": 2,
        "gap_kind_unknown": 1,
        "gap_not_recorded": 1,
        "session_without_calls": 2,
        "time_back": 1,
    }


def test_the_reported_output_is_never_used(traces_dir):
    trace = load(traces_dir / "agentic" / "claude_code_steps.jsonl.gz")
    outputs = sorted(step.output_tokens for p in trace.programs for step in p.steps)
    assert 110 < outputs[len(outputs) // 2] < 125  # by text; the reported median is 3
