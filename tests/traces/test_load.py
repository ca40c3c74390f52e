"""The entry: what is no trace is refused in one line, and content decides, not names."""

import gzip
from pathlib import Path

import pytest

from kvtier.errors import TraceError
from kvtier.traces import load, synth, write_native


def refusal(path: Path | str) -> str:
    with pytest.raises(TraceError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_a_missing_file_is_named(tmp_path):
    assert "no such file or folder; check the path" in refusal(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b" \n\n\t\n", "nothing but white space"),
        (b"hello\nworld\n", "this is no trace"),
        (bytes(range(256)) * 8, "this is no trace"),
        (b'{"a": 1}\n{"b": 2}\n', "JSON of a kind that is not known"),
        (b"\x28\xb5\x2f\xfd rest", "zstd -d"),
        (b"\x1f\x8b broken", "nothing but white space"),
        (gzip.compress(b"", mtime=0), "nothing but white space"),
        (b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n", "Azure LLM trace"),
    ],
)
def test_a_file_that_is_no_trace_says_what_it_looks_like(tmp_path, content, words):
    file = tmp_path / "some file"
    file.write_bytes(content)
    message = refusal(file)
    assert words in message
    assert "some file" in message


def test_a_refusal_lists_what_is_read(tmp_path):
    file = tmp_path / "t"
    file.write_text('{"requests": [], "block_size": 64}\n')
    message = refusal(file)
    for name in ("native JSONL", "Mooncake", "Claude Code transcripts", "step table"):
        assert name in message


def test_a_folder_without_transcripts_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("# nothing\n")
    assert "no Claude Code transcript in this folder" in refusal(tmp_path)


def test_a_transcript_without_calls_is_refused_and_not_an_empty_trace(transcript, tmp_path):
    message = refusal(transcript().prompt(0).reply(1, "a", 0).write(tmp_path / "t"))
    assert "no model call with token counts in it (call_without_usage 1)" in message


@pytest.mark.parametrize("name", ["trace.csv", "trace.gz", "README", "x.traj"])
def test_content_decides_and_not_the_name(tmp_path, name):
    plain, packed = tmp_path / name, tmp_path / f"packed-{name}"
    trace = synth("batch-react", 3, 1)
    write_native(trace, plain)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        again = load(str(file))
        assert (again.format, again.sha256, again.source) == ("native", trace.sha256, file.name)


def test_damage_before_the_first_record_does_not_hide_the_format(transcript, tmp_path):
    lines = transcript().prompt(0).reply(1, "a", 100).lines()
    file = tmp_path / "t"
    file.write_text("\n".join(["garbage", *lines]))
    assert load(file).warnings == {"bad_line": 1}
