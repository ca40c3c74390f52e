"""What is no regular file is neither read nor replaced; nothing real is ever written to here."""

import json
import os
import socket
from pathlib import Path

import pytest

from kvtier.errors import TraceError
from kvtier.traces import load, synth, write_native

TRACE = synth("batch-react", 2, 0)


def refusal(path: Path) -> str:
    """The one line with which writing to `path` is refused."""
    with pytest.raises(TraceError) as caught:
        write_native(TRACE, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_fifo_is_not_replaced(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    for path in (fifo, link):
        assert "this is a FIFO and is not written to" in refusal(path)
    assert fifo.is_fifo()
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link"]


def test_a_folder_and_a_socket_are_not_replaced(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert "this is a socket" in refusal(tmp_path / "socket")
    assert "this is a folder" in refusal(tmp_path / "folder")


def test_what_a_link_points_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target = tmp_path / "kept" / "target.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to("kept/target.jsonl")
    for before in (None, "old"):
        if before is not None:
            target.write_text(before)
        write_native(TRACE, link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert load(target).sha256 == TRACE.sha256
        assert [path.name for path in target.parent.iterdir()] == ["target.jsonl"]


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "loop"
    link.symlink_to("loop")
    assert "cannot be written" in refusal(link) or "loop of links" in refusal(link)
    assert link.is_symlink()


def test_a_parent_that_is_a_file_is_named_and_no_temporary_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(tmp_path / "file" / "t.jsonl")
    assert message.endswith("file/t.jsonl: cannot be written (Not a directory); name another file")


@pytest.mark.parametrize("name", ["fifo", "link", "zero"])
def test_a_stream_is_refused_before_it_is_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(TraceError, match=r"this is a (FIFO|device) and is not read"):
        load(tmp_path / name)


def test_a_stream_in_a_folder_is_one_of_the_other_files(transcript, tmp_path: Path) -> None:
    transcript().prompt(0).reply(1, "a", 100).write(tmp_path / "t.jsonl")
    os.mkfifo(tmp_path / "fifo")
    assert load(tmp_path).warnings["other_file"] == 1


def test_a_folder_of_other_formats_is_told_by_their_names(tmp_path: Path) -> None:
    codex = {"timestamp": "2026-01-01T00:00:00Z", "type": "session_meta", "payload": {}}
    for index in range(2):
        (tmp_path / f"{index}.jsonl").write_text(json.dumps(codex) + "\n")
    (tmp_path / "g.json").write_text('{"projectHash": "x"}\n')
    with pytest.raises(TraceError) as caught:
        load(tmp_path)
    assert "but a Codex rollout (2), a Gemini CLI session (1)" in str(caught.value)


def test_a_fault_of_the_programs_is_told_with_the_path(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 0, "output_length": 1, "session_id": "a"}\n')
    with pytest.raises(TraceError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: no model call")
