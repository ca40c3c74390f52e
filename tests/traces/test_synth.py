"""Synthetic traces: same seed same bytes, and the figures their sources give."""

import math
from statistics import fmean, median

import pytest

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.traces import PROFILES, GapKind, Step, Trace, summarize, synth, write_native
from kvtier.traces.profiles import Quantiles


def steps_of(trace: Trace) -> list[Step]:
    return [step for program in trace.programs for step in program.steps]


def gaps(trace: Trace, kind: GapKind) -> list[float]:
    return sorted(step.gap_s for step in steps_of(trace) if step.gap_kind is kind)


def at(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


@pytest.fixture(scope="module")
def autonomous() -> Trace:
    return synth("coding-autonomous", 300, 1)


@pytest.fixture(scope="module")
def interactive() -> Trace:
    return synth("coding-interactive", 300, 1)


@pytest.fixture(scope="module")
def batch() -> Trace:
    return synth("batch-react", 256, 1)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, name):
    for file, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_native(synth(name, 5, seed), tmp_path / file)
    a, b, c = ((tmp_path / file).read_bytes() for file in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_larger_trace_begins_with_the_smaller_one(name):
    assert synth(name, 8, 3).programs[:5] == synth(name, 5, 3).programs


def test_autonomous_gaps_follow_the_published_tool_times(autonomous):
    tool_s = gaps(autonomous, GapKind.TOOL)
    assert at(tool_s, 0.5) == pytest.approx(1.096, rel=0.05)
    assert at(tool_s, 0.9) == pytest.approx(2.034, rel=0.1)
    assert at(tool_s, 0.99) == pytest.approx(19.98, rel=0.3)
    long_s = [gap for gap in tool_s if gap > 2]
    assert len(long_s) / len(tool_s) == pytest.approx(0.13, abs=0.02)
    assert sum(long_s) / sum(tool_s) == pytest.approx(0.58, abs=0.05)
    assert gaps(autonomous, GapKind.PROMPT) == []


def test_autonomous_gaps_persist_from_step_to_step(autonomous):
    found = []
    for program in autonomous.programs:
        logs = [math.log(step.gap_s) for step in program.steps[:-1]]
        if len(logs) > 20:
            found.append(correlation(logs[:-1], logs[1:]))
    assert median(found) == pytest.approx(0.30, abs=0.06)


def correlation(xs: list[float], ys: list[float]) -> float:
    mean_x, mean_y = fmean(xs), fmean(ys)
    cross = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread_x = sum((x - mean_x) ** 2 for x in xs)
    spread_y = sum((y - mean_y) ** 2 for y in ys)
    return cross / math.sqrt(spread_x * spread_y)


def test_autonomous_contexts_and_lengths_follow_the_published_runs(autonomous):
    contexts = [step.context_tokens for step in steps_of(autonomous)]
    for share, tokens in ((0.1, 20_000), (0.5, 42_000), (0.9, 73_000)):
        assert at(contexts, share) == pytest.approx(tokens, rel=0.2)
    lengths = [len(program.steps) for program in autonomous.programs]
    for share, steps in ((0.1, 17), (0.5, 44), (0.9, 91)):
        assert at(lengths, share) == pytest.approx(steps, rel=0.15)


def test_interactive_gaps_hold_people_and_heavy_tails(interactive):
    tool_s, human_s = gaps(interactive, GapKind.TOOL), gaps(interactive, GapKind.PROMPT)
    assert at(tool_s, 0.5) == pytest.approx(0.1, rel=0.15)
    assert at(tool_s, 0.9) == pytest.approx(10, rel=0.25)
    assert at(tool_s, 0.99) == pytest.approx(192, rel=0.3)
    assert at(human_s, 0.5) == pytest.approx(86, rel=0.2)
    assert at(human_s, 0.9) == pytest.approx(1260, rel=0.5)
    share = len(human_s) / (len(human_s) + len(tool_s))
    assert share == pytest.approx(1 / 8.8, rel=0.1)
    assert summarize(interactive)["pooled_idleness"] == pytest.approx(0.95, abs=0.03)


def test_interactive_contexts_follow_the_public_sessions(interactive):
    contexts = [step.context_tokens for step in steps_of(interactive)]
    for share, tokens in ((0.1, 49_000), (0.5, 93_000), (0.9, 142_000)):
        assert at(contexts, share) == pytest.approx(tokens, rel=0.15)


def test_compaction_comes_at_155k_to_177k_and_keeps_only_the_head(interactive):
    seen = 0
    for program in interactive.programs:
        for before, after in zip(program.steps, program.steps[1:], strict=False):
            if before.gap_kind is GapKind.COMPACT:
                seen += 1
                assert 100_000 < before.context_tokens <= 177_000
                assert 31_000 <= after.context_tokens <= 71_000
                assert after.reused_tokens == program.shared_tokens
            else:
                assert after.reused_tokens == before.context_tokens + before.output_tokens
                assert after.context_tokens <= 177_000
    assert seen > 50


def test_batch_agents_start_together_and_grow_to_6k_tokens_in_ten_steps(batch):
    firsts = [program.steps[0].context_tokens for program in batch.programs]
    lasts = [program.steps[-1].context_tokens for program in batch.programs]
    assert {program.start_s for program in batch.programs} == {0.0}
    assert fmean(firsts) == pytest.approx(1_200, rel=0.05)
    assert fmean(lasts) == pytest.approx(6_000, rel=0.1)
    assert fmean(len(p.steps) for p in batch.programs) == pytest.approx(10, rel=0.05)
    assert {(p.shared_group, p.shared_tokens) for p in batch.programs} == {
        ("synth-batch-react", 1_000)
    }
    assert fmean(gaps(batch, GapKind.TOOL)) == pytest.approx(0.925, rel=0.15)
    assert fmean(s.output_tokens for s in steps_of(batch)) == pytest.approx(100, rel=0.1)


def test_an_unknown_profile_names_the_nearest_and_all_known():
    with pytest.raises(UnknownNameError, match="coding-autonomous") as caught:
        synth("coding-autonomus", 1, 0)
    assert all(name in str(caught.value) for name in PROFILES)


def test_a_trace_of_no_programs_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        synth("batch-react", 0, 0)


def test_quantiles_pass_through_their_points():
    q = Quantiles(((0.0, 1.0), (0.5, 4.0), (1.0, 64.0)))
    assert [q.at(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([1, 2, 4, 16, 64])
