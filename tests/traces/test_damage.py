"""Damaged files: hand-counted calls and tokens, equal siblings, and random damage."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import TraceError
from kvtier.traces import check, load

# Counted apart from the readers: rows split by hand, distinct (message id, request id) of
# assistant rows that are not synthetic, input + cache_creation + cache_read of each.
HAND_COUNTED = {
    # two records on one line (115 and 241); the reply of line 115 is written again in line 116
    "cc_2_1_7_00.jsonl.gz": (59, 3_758_344, 41_489, 93_300, {"glued_records": 2}),
    # 225 replies in 517 rows
    "cc_2_1_7_02.jsonl.gz": (225, 25_645_626, 42_454, 62_661, {}),
    # 207 replies in 371 rows, up to 7 rows each; 68 rows older than the row before
    "cc_2_1_32_10.jsonl.gz": (207, 24_750_551, 43_352, 144_598, {"time_back": 68}),
    # 8 rows older than the row before, one result without a use
    "cc_2_1_29_05.jsonl": (22, 1_632_666, 39_671, 87_068, {"time_back": 8, "orphan_result": 1}),
}


@pytest.mark.parametrize("name", sorted(HAND_COUNTED))
def test_calls_and_context_tokens_equal_the_hand_count(traces_dir: Path, name: str):
    calls, total, first, last, warnings = HAND_COUNTED[name]
    trace = load(traces_dir / "transcripts" / "claude-code" / name)
    steps = next(p.steps for p in trace.programs if p.parent is None)
    contexts = [step.context_tokens for step in steps]
    assert (len(contexts), sum(contexts), contexts[0], contexts[-1]) == (calls, total, first, last)
    assert warnings.items() <= trace.warnings.items()


SIBLINGS = {
    "crlf_bom.jsonl": ("cc_2_1_31_16.jsonl", {}),
    "mixed_time_zones.jsonl": ("cc_2_1_37_11.jsonl", {}),
    "torn_last_line.jsonl": ("cc_2_1_29_15.jsonl", {"torn_last_line": 1}),
}


@pytest.mark.parametrize("name", sorted(SIBLINGS))
def test_a_mutated_file_gives_the_programs_of_its_undamaged_sibling(traces_dir: Path, name: str):
    sibling, added = SIBLINGS[name]
    damaged = load(traces_dir / "derived_odd" / name)
    whole = load(traces_dir / "transcripts" / "claude-code" / sibling)
    assert damaged.programs == whole.programs
    assert damaged.sha256 == whole.sha256
    assert damaged.warnings == whole.warnings | added


def test_two_calls_glued_on_one_line_are_both_kept(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100).prompt(2).reply(3, "b", 200)
    one, two, three, four = t.lines()
    (tmp_path / "t").write_text("\n".join([one, two + three + four]) + "\n")
    trace = load(tmp_path / "t")
    assert trace.num_steps == 2
    assert trace.warnings == {"glued_records": 1}


def test_a_whole_record_after_a_torn_one_on_the_same_line_is_kept(transcript, tmp_path):
    t = transcript().prompt(0).reply(1, "a", 100).prompt(2).reply(3, "b", 200)
    one, two, three, four = t.lines()
    (tmp_path / "t").write_text("\n".join([one, two, three[:40] + four, "", "   "]) + "\n")
    trace = load(tmp_path / "t")
    assert trace.num_steps == 2
    assert trace.warnings == {"torn_last_line": 1, "input_not_found": 1}


def test_a_line_that_is_no_json_is_skipped_and_counted(transcript, tmp_path):
    lines = transcript().prompt(0).reply(1, "a", 100).lines()
    (tmp_path / "t").write_bytes("\n".join([lines[0], "{{{", "7", lines[1]]).encode() + b"\n\xff\n")
    trace = load(tmp_path / "t")
    assert trace.warnings == {"bad_line": 1, "bad_utf8": 1, "not_an_object": 1, "torn_last_line": 1}


def test_a_gzip_file_cut_short_keeps_what_came_before(transcript, tmp_path):
    t = transcript()
    for i in range(200):
        t.prompt(2 * i).reply(2 * i + 1, f"m{i}", 100 + 37 * i % 501)
    packed = gzip.compress("\n".join(t.lines()).encode(), 1)
    (tmp_path / "t").write_bytes(packed[: len(packed) * 2 // 3])
    trace = load(tmp_path / "t")
    assert 50 < trace.num_steps < 200
    assert trace.warnings["torn_gzip"] == 1


def small_transcript(make) -> bytes:
    t = make().prompt(0).reply(2, "a", 40_000, tool=("t1", "Bash")).result(4, "t1")
    t.reply(7, "b", 41_000, tool=("t2", "Read")).reply(8, "b", 41_000).result(9, "t2")
    t.add("system", 10, subtype="compact_boundary").prompt(11).reply(13, "c", 20_000)
    return ("\n".join(t.lines()) + "\n").encode()


damage = st.lists(
    st.tuples(
        st.sampled_from(["cut", "drop newline", "flip", "double"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=6,
)


def apply(data: bytes, kind: str, share: float, byte: int) -> bytes:
    at = int(share * len(data))
    if kind == "cut":
        return data[:at] + data[at + byte :]
    if kind == "drop newline":
        at = data.find(b"\n", at)
        return data if at < 0 else data[:at] + data[at + 1 :]
    if kind == "double":
        return data[:at] + data[max(0, at - byte) :]
    return data[:at] + bytes([byte]) + data[at + 1 :]


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NATIVE = b"""\
{"timestamp":0,"input_length":900,"output_length":9,"session_id":"p","tools":[["Bash",0.5]]}
{"timestamp":1,"input_length":950,"output_length":9,"session_id":"p","delay":0.5,"reused":900}
{"timestamp":2,"input_length":99,"output_length":9,"session_id":"q","parent_id":"p","reason":2.5}
{"timestamp":3,"input_length":70,"output_length":0,"session_id":"q","shared_group":"g"}
"""
MOONCAKE = b"""\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1600, "output_length": 490, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [0, 5]}
"""
STEP_TABLE = b"""\
{"session":"a","versions":["2.1.7"],"steps":[{"t":0,"reason":5.5,"act":0.1,"next":"tool","in":10,\
"cw":40000,"cr":0,"out_chars":488,"tools":[["Bash",0.1]]},{"t":6,"reason":6.7,"act":null,\
"next":null,"in":2,"cw":151,"cr":40010,"out_chars":708,"tools":[]}]}
"""


def load_damaged(data: bytes, damage: list[tuple[str, float, int]], file: Path) -> None:
    """Loading gives a sound trace (no negative or endless gap, no negative tokens) or one line."""
    for kind, share, byte in damage:
        data = apply(data, kind, share, byte)
    file.write_bytes(data)
    try:
        trace = load(file)
    except TraceError as error:
        refusal = str(error)
    else:
        refusal = ""
        check(trace)
        assert all(count > 0 for count in trace.warnings.values())
    assert "\n" not in refusal


@settings(relaxed, max_examples=300)
@given(damage=damage)
def test_random_damage_to_a_transcript_never_escapes(transcript, tmp_path, damage):
    load_damaged(small_transcript(transcript), damage, tmp_path / "t")


@settings(relaxed, max_examples=100)
@given(damage=damage)
def test_random_damage_to_a_packed_file_never_escapes(transcript, tmp_path, damage):
    packed = gzip.compress(small_transcript(transcript), mtime=0)
    load_damaged(packed, damage, tmp_path / "t")


@settings(relaxed, max_examples=25)
@given(damage=damage)
def test_random_damage_to_a_published_transcript_never_escapes(traces_dir, tmp_path, damage):
    data = (traces_dir / "transcripts" / "claude-code" / "cc_2_1_29_15.jsonl").read_bytes()
    load_damaged(data, damage, tmp_path / "t")


@settings(relaxed, max_examples=300)
@given(data=st.sampled_from([NATIVE, MOONCAKE, STEP_TABLE]), damage=damage)
def test_random_damage_to_the_other_formats_never_escapes(tmp_path, data, damage):
    load_damaged(data, damage, tmp_path / "t")


@settings(relaxed, max_examples=200)
@given(data=st.binary(max_size=200))
def test_random_bytes_never_escape(tmp_path, data):
    load_damaged(data, [], tmp_path / "t")
