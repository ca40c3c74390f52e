"""Mooncake rows: requests are chained into programs by their block ids."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.traces import GapKind, Trace, load


def read(tmp_path: Path, *requests: tuple[int, int, Sequence[int]]) -> Trace:
    rows = [
        f'{{"timestamp": {ms}, "input_length": {tokens}, "output_length": 7, "hash_ids": {ids}}}'
        for ms, tokens, ids in requests
    ]
    file = tmp_path / "rows"
    file.write_text("\n".join(rows) + "\n")
    return load(file)


def shape(trace: Trace) -> list[list[int]]:
    return [[step.context_tokens for step in program.steps] for program in trace.programs]


def test_a_request_that_extends_all_full_blocks_is_the_next_step(tmp_path):
    trace = read(tmp_path, (0, 1100, [1, 2, 3]), (4000, 1700, [1, 2, 4, 5]))
    (program,) = trace.programs
    assert [s.reused_tokens for s in program.steps] == [0, 1024]
    assert [s.gap_s for s in program.steps] == [4.0, 0.0]
    assert [s.gap_kind for s in program.steps] == [GapKind.PROMPT, GapKind.END]
    assert [s.reason_s for s in program.steps] == [None, None]


def test_a_request_that_lacks_a_full_block_starts_another_program(tmp_path):
    trace = read(tmp_path, (0, 1600, [1, 2, 3, 4]), (4000, 1700, [1, 2, 5, 6]))
    assert shape(trace) == [[1600], [1700]]


def test_a_prompt_that_is_only_a_known_head_is_continued_by_nobody(tmp_path):
    trace = read(tmp_path, (0, 1600, [1, 2, 3, 4]), (1000, 700, [1, 9]), (2000, 900, [1, 8]))
    assert shape(trace) == [[1600], [700], [900]]


def test_two_requests_that_extend_one_prompt_are_a_step_and_a_new_program(tmp_path):
    trace = read(tmp_path, (0, 1024, [1, 2]), (1000, 1600, [1, 2, 3]), (2000, 1700, [1, 2, 4]))
    assert shape(trace) == [[1024, 1600], [1700]]


def test_a_step_that_adds_no_full_block_keeps_the_chain(tmp_path):
    trace = read(tmp_path, (0, 600, [1, 2]), (1000, 800, [1, 3]), (2000, 1500, [1, 4, 5]))
    assert shape(trace) == [[600, 800, 1500]]


def test_requests_of_one_instant_are_different_programs(tmp_path):
    trace = read(tmp_path, (0, 1024, [1, 2]), (0, 1600, [1, 2, 3]))
    assert len(trace.programs) == 2


def test_programs_whose_first_prompts_begin_alike_share_a_group(tmp_path):
    trace = read(
        tmp_path,
        (0, 1600, [1, 2, 3, 4]),
        (0, 1700, [1, 2, 5, 6]),
        (0, 900, [1, 7]),
        (0, 900, [8, 9]),
    )
    assert [(p.shared_group, p.shared_tokens) for p in trace.programs] == [
        ("head-2", 1024),
        ("head-2", 1024),
        ("head-1", 512),
        (None, 0),
    ]


def test_rows_without_hashes_are_programs_of_one_step_in_time_order(tmp_path):
    file = tmp_path / "rows"
    file.write_text(
        '{"timestamp": 9000, "input_length": 9, "output_length": 1}\n'
        '{"timestamp": 1000, "input_length": 1, "output_length": 1}\n'
        '{"timestamp": 1000, "input_length": -1, "output_length": 1}\n'
    )
    trace = load(file)
    assert [(p.start_s, p.steps[0].context_tokens) for p in trace.programs] == [(0, 1), (8, 9)]
    assert trace.warnings == {"bad_row": 1, "time_back": 1}


def test_the_published_trace_keeps_every_request_and_most_of_its_reuse(traces_dir: Path):
    trace = load(traces_dir / "serving" / "mooncake_conversation_trace.jsonl.gz")
    steps = [step for program in trace.programs for step in program.steps]
    tokens = sum(step.context_tokens for step in steps)
    reused = sum(step.reused_tokens for step in steps)
    heads = [(p.shared_group, p.shared_tokens) for p in trace.programs]
    reused += sum(size for _, size in heads) - sum(size for _, size in set(heads))
    assert tokens / len(steps) == pytest.approx(12_035, rel=0.001)  # published mean input
    # an endless cache hits 36.6 % of these tokens; deep branches are what is missing
    assert 0.33 < reused / tokens < 0.366
