"""A trace may be named anything: names are shown, and never read as markup or formulas."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtier.cli.app import run
from kvtier.traces import synth, write_native

REPLAY = ("--policy", "lru", "--no-bound", "--duration", "60s", "--programs", "2")
NAMES = ["$x", "a$b$c", "$x^$", "$\\frac$", "[red]", "[bold", "日本語", "a\nb", "-->", "\\frac{1}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_any_name_is_replayed_and_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_native(synth("batch-react", 2, 0), f"{name}.jsonl")
    assert run(["replay", f"./{name}.jsonl", *REPLAY, "--out", "out"]) == 0
    out, err = capsys.readouterr()
    assert f"trace  {name}.jsonl (native)".replace("\n", "\\n") in out
    assert len(err.splitlines()) == 2
    for plot in ("overview", "places"):
        svg = (tmp_path / "out" / f"{plot}.svg").read_text(encoding="utf-8")
        assert ElementTree.fromstring(svg).tag.endswith("svg")


@pytest.mark.parametrize("name", ["[red]", "[bold", "日本語"])
def test_a_name_is_whole_in_trace_info(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_native(synth("batch-react", 2, 0), f"{name}.jsonl")
    assert run(["trace", "info", f"{name}.jsonl"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}.jsonl\n")
