"""What a Claude Code transcript means: calls, gaps, tools, reuse, sub-agents, repairs."""

from pathlib import Path

import pytest

from kvtier.traces import GapKind, ToolCall, load

S1 = "sidechain-root"


def test_one_reply_in_many_rows_is_one_call_that_ends_with_its_last_row(transcript, tmp_path):
    t = transcript().prompt(0).reply(2, "a", 100).reply(5, "a", 100).prompt(65).reply(70, "b", 300)
    trace = load(t.write(tmp_path / "t"))
    first, last = trace.programs[0].steps
    assert (first.context_tokens, first.output_tokens, first.reason_s) == (100, 20, 5.0)
    assert (first.gap_s, first.gap_kind) == (60.0, GapKind.PROMPT)
    assert (last.gap_s, last.gap_kind) == (0.0, GapKind.END)


def test_output_comes_from_text_length_and_never_from_reported_tokens(transcript, tmp_path):
    t = transcript().prompt(0).reply(2, "a", 100, text="x" * 350)
    assert load(t.write(tmp_path / "t")).programs[0].steps[0].output_tokens == 100


def test_a_tool_is_timed_from_its_use_to_its_result_and_the_gap_by_the_last_result(
    transcript, tmp_path
):
    t = transcript().prompt(0)
    t.reply(2, "a", 100, tool=("t1", "Read")).reply(3, "a", 100, tool=("t2", "Bash"))
    t.result(10, "t2").result(4, "t1").reply(12, "b", 200)
    step = load(t.write(tmp_path / "t")).programs[0].steps[0]
    assert step.tools == (ToolCall("Read", 2.0), ToolCall("Bash", 7.0))
    assert (step.gap_s, step.gap_kind) == (7.0, GapKind.TOOL)


def test_a_prompt_after_the_result_makes_the_gap_a_persons(transcript, tmp_path):
    t = transcript().prompt(0).reply(2, "a", 100, tool=("t1", "Edit"))
    t.result(4, "t1").prompt(30).reply(33, "b", 200)
    step = load(t.write(tmp_path / "t")).programs[0].steps[0]
    assert (step.gap_s, step.gap_kind) == (28.0, GapKind.PROMPT)


def test_a_growing_context_keeps_prompt_and_output_and_a_shrunk_one_only_the_head(
    transcript, tmp_path
):
    t = transcript().prompt(0).reply(1, "a", 40_000).prompt(2).reply(3, "b", 60_000)
    t.prompt(4).reply(5, "c", 50_000)
    program = load(t.write(tmp_path / "t")).programs[0]
    assert (program.shared_group, program.shared_tokens) == ("claude-code-2.1", 15_000)
    assert [step.reused_tokens for step in program.steps] == [0, 40_010, 15_000]


def test_a_compaction_boundary_ends_the_gap_and_loses_all_but_the_head(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 20_000).prompt(2)
    t.add("system", 60, subtype="compact_boundary", parentUuid=None)
    t.prompt(60, isCompactSummary=True).reply(65, "b", 30_000)
    program = load(t.write(tmp_path / "t")).programs[0]
    assert program.steps[0].gap_kind is GapKind.COMPACT
    assert program.shared_tokens == 10_000  # half of the first context
    assert program.steps[1].reused_tokens == 10_000


def test_microcompaction_loses_the_prefix_though_the_context_grows(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 40_000).prompt(2)
    t.add("system", 3, subtype="microcompact_boundary").reply(5, "b", 41_000)
    steps = load(t.write(tmp_path / "t")).programs[0].steps
    assert (steps[0].gap_kind, steps[1].reused_tokens) == (GapKind.PROMPT, 15_000)


def test_every_branch_of_the_tree_is_followed(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100, parentUuid="u0")
    t.prompt(2, parentUuid="u1").reply(3, "b", 200, parentUuid="u2")
    t.prompt(4, parentUuid="u1").reply(5, "c", 150, parentUuid="u4")
    assert load(t.write(tmp_path / "t")).num_steps == 3


def test_made_up_replies_and_errors_are_no_calls(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100).prompt(2)
    t.add("system", 3, subtype="api_error").reply(4, "x", 100, model="<synthetic>")
    t.reply(5, "y", 100, isApiErrorMessage=True).reply(9, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert trace.num_steps == 2
    assert trace.warnings == {"api_error": 1, "synthetic_reply": 2}


def test_a_call_without_usage_is_skipped_and_its_input_counts_for_the_next(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100).prompt(11).reply(12, "zero", 0)
    t.reply(15, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert [step.gap_s for step in trace.programs[0].steps] == [10.0, 0.0]
    assert trace.warnings == {"call_without_usage": 1}


def test_a_clock_that_steps_back_in_a_gap_gives_a_gap_of_zero(transcript, tmp_path):
    t = transcript().prompt(3000).reply(3005, "a", 100).prompt(10).reply(12, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert trace.programs[0].steps[0].gap_s == 0.0
    assert trace.warnings == {"negative_span": 1, "time_back": 1}


def test_results_without_use_and_uses_without_result_are_counted(transcript, tmp_path):
    t = transcript().result(0, "gone").reply(1, "a", 100, tool=("t1", "Bash"))
    t.prompt(3).reply(5, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert trace.programs[0].steps[0].tools == (ToolCall("Bash", None),)
    assert trace.warnings == {"orphan_result": 1, "tool_without_result": 1}


def test_a_second_session_id_in_a_file_goes_on_with_the_same_program(transcript, tmp_path):
    t = transcript("old").prompt(0).reply(1, "a", 100)
    t.session = "new"
    t.prompt(2).reply(3, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert [(p.program, len(p.steps)) for p in trace.programs] == [("new", 2)]
    assert trace.warnings == {"second_session_id": 1}


def test_progress_rows_make_a_child_program_with_its_own_group(transcript, tmp_path):
    t = transcript().prompt(0).reply(2, "a", 30_000, tool=("t1", "Task"))
    inner = transcript("ignored").prompt(3).reply(6, "s1", 12_000).reply(9, "s2", 13_000)
    for at_s, row in zip((3, 6, 9), inner.rows, strict=True):
        row["uuid"] = f"inner-{at_s}"
        t.add("progress", at_s, data={"type": "agent_progress", "agentId": "ag", "message": row})
    t.result(20, "t1").reply(22, "b", 31_000)
    trace = load(t.write(tmp_path / "t"))
    parent, child = trace.programs
    assert (child.program, child.parent, child.start_s) == ("s1/ag", "s1", 3.0)
    assert (child.shared_group, child.shared_tokens) == ("claude-code-2.1-agent", 6_000)
    assert [len(p.steps) for p in (parent, child)] == [2, 2]
    assert trace.num_subagents == 1


def test_a_side_chain_without_agent_id_is_a_child_named_by_its_first_row(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100)
    t.prompt(2, isSidechain=True, parentUuid=None, uuid=S1)
    t.reply(3, "s", 50, isSidechain=True, parentUuid=S1, uuid="side-2")
    t.prompt(4, isSidechain=True, parentUuid="side-2").reply(5, "b", 200)
    trace = load(t.write(tmp_path / "t"))
    assert [(p.program, len(p.steps)) for p in trace.programs] == [("s1", 2), (f"s1/{S1}", 1)]


def test_a_folder_joins_sessions_and_their_subagent_files(transcript, tmp_path):
    transcript("s1").prompt(0).reply(1, "a", 100).write(tmp_path / "s1.jsonl")
    agents = tmp_path / "project" / "s1" / "subagents"
    agents.mkdir(parents=True)
    side = {"isSidechain": True, "agentId": "ag"}
    t = transcript("s1").prompt(5, **side).reply(7, "x", 50, **side)
    t.write(agents / "agent-ag.jsonl")
    (tmp_path / "notes.txt").write_text("no trace\n")
    (tmp_path / "nothing").write_text("")
    trace = load(tmp_path)
    assert [(p.program, p.parent) for p in trace.programs] == [("s1", None), ("s1/ag", "s1")]
    assert trace.warnings == {"other_file": 1, "empty_file": 1}


def test_a_subagent_told_of_twice_is_one_program(transcript, tmp_path):
    inner = transcript("s1").reply(3, "x", 50, uuid="i1", isSidechain=True, agentId="ag")
    t = transcript("s1").prompt(0).reply(1, "a", 100)
    nested = {"type": "agent_progress", "agentId": "ag", "message": inner.rows[0]}
    t.add("progress", 3, data=nested).write(tmp_path / "a.jsonl")
    inner.reply(9, "y", 80, uuid="i2", isSidechain=True, agentId="ag").write(tmp_path / "b.jsonl")
    trace = load(tmp_path)
    assert [(p.program, len(p.steps)) for p in trace.programs] == [("s1", 1), ("s1/ag", 2)]


def test_published_subagent_files_are_children_of_their_session(traces_dir: Path):
    trace = load(traces_dir / "transcripts" / "claude-code-subagents")
    parent = "a13dc111-8794-a1cf-bfbd-dbbd24304a70"
    assert [p.parent for p in trace.programs] == [None] + [parent] * 5
    assert [len(p.steps) for p in trace.programs] == [11, 2, 2, 2, 2, 2]


def test_transcripts_agree_with_the_step_table_made_from_them(traces_dir: Path):
    table = load(traces_dir / "agentic" / "claude_code_steps.jsonl.gz")
    by_contexts = {tuple(s.context_tokens for s in p.steps): p for p in table.programs}
    files = sorted((traces_dir / "transcripts" / "claude-code").iterdir())
    for file in files:
        mine = next(p for p in load(file).programs if p.parent is None)
        theirs = by_contexts[tuple(s.context_tokens for s in mine.steps)]
        assert mine.shared_group == theirs.shared_group
        for ours, other in zip(mine.steps, theirs.steps, strict=True):
            assert ours.gap_kind is other.gap_kind
            assert ours.gap_s == pytest.approx(other.gap_s, abs=0.002)
            assert ours.reason_s == pytest.approx(other.reason_s, abs=0.002)
            assert [t.name for t in ours.tools] == [t.name for t in other.tools]
        total = sum(s.output_tokens for s in mine.steps)
        # the table measured the text itself: escapes that a removed text hides are in it
        assert total == pytest.approx(sum(s.output_tokens for s in theirs.steps), rel=0.06)
