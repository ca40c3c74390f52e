"""results.json: what is in it, what the documentation says of it, and that it is reproducible."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .replays import CLOSED, ROOT, Replay, environment

PAGE = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")


def documented(header: str) -> list[str]:
    """Names in the first column of the table that starts with `header`."""
    rows = PAGE[PAGE.index(header) :].splitlines()[2:]
    names: list[str] = []
    for row in rows:
        if not row.startswith("|"):
            break
        names += re.findall(r"`([^`]+)`", row.split("|")[1])
    return names


def test_the_documented_fields_are_the_fields_of_a_run(closed: Replay) -> None:
    for run in closed.results["runs"]:
        assert sorted(documented("| field | meaning |")) == sorted(run)
        assert sorted(documented("| series | meaning |")) == sorted(run["series"])


def test_the_documented_flags_are_the_flags_of_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", "--help"],
        env=environment({"COLUMNS": "200"}),
        capture_output=True,
        text=True,
        check=True,
    )
    offered = set(re.findall(r"(?<![\w-])--[a-z-]+", result.stdout)) - {"--help"}
    assert offered >= {"--policy", "--no-bound"}
    table = {name for name in documented("| flag | default | meaning |") if name != "PATH"}
    assert {flag for flag in offered if f"`{flag}`" in PAGE} == offered
    assert table <= offered


def test_every_seed_has_a_run_of_every_policy(closed: Replay) -> None:
    assert closed.process.returncode == 0, closed.process.stderr
    pairs = [(run["seed"], run["policy"], run["admission"]) for run in closed.results["runs"]]
    combinations = [
        ("lru", "none"),
        ("lru+offload-wb", "none"),
        ("mori", "concur"),
        ("infinite", "none"),
    ]
    assert pairs == [(seed, *pair) for seed in (0, 1) for pair in combinations]


def test_the_results_name_their_inputs(closed: Replay) -> None:
    results = closed.results
    assert (results["simulated"], results["partial"]) == (True, False)
    assert results["command"] == ["kvtier", "replay", *canonical(CLOSED)]
    assert results["trace"]["source"] == "coding-autonomous-n60-s0"
    assert results["trace"]["sha256"] == results["runs"][0]["trace_sha256"]
    assert results["config"]["replay"]["seeds"] == [0, 1]
    assert results["config"]["replay"]["duration_s"] == 120.0
    assert set(results["config"]) == {"scheduler", "admission", "engine", "replay", "calibration"}


def canonical(arguments: tuple[str, ...]) -> list[str]:
    """The arguments in the order in which the command declares its options."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    order = ("--profile", "--policy", "--gpu", "--programs", "--duration", "--seeds")
    return [word for name in order for word in (name, given[name])]


def test_figures_of_a_run_agree_with_each_other(closed: Replay) -> None:
    for run in closed.results["runs"]:
        assert run["output_tok_per_s"] == pytest.approx(run["output_tokens"] / run["simulated_s"])
        assert run["steps_per_min"] == pytest.approx(60 * run["steps"] / run["simulated_s"])
        assert 0 <= run["hit_rate_hbm"] + run["hit_rate_dram"] <= 1
        assert run["ttft_p50_s"] <= run["ttft_p90_s"] <= run["ttft_p99_s"]
        assert len({len(values) for values in run["series"].values()}) == 1


def test_same_seed_same_bytes_in_another_process(closed: Replay, closed_again: Replay) -> None:
    names = sorted(path.name for path in closed.folder.iterdir())
    assert names == sorted(path.name for path in closed_again.folder.iterdir())
    assert [n for n in names if content(closed, n) != content(closed_again, n)] == []
    assert closed.process.stdout == closed_again.process.stdout


def content(replay: Replay, name: str) -> bytes:
    return (replay.folder / name).read_bytes()


def test_no_path_of_this_machine_gets_into_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.cli.app import run
    from kvtier.traces import synth, write_native

    monkeypatch.chdir(tmp_path)
    write_native(synth("batch-react", 2, 0), tmp_path / "two.jsonl")
    arguments = ["replay", str(tmp_path / "two.jsonl"), "--policy", "lru", "--no-bound"]
    code = run([*arguments, "--duration", "60s", "--programs", "2", "--json"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    written = (tmp_path / "kvtier-replay" / "results.json").read_text()
    assert code == 0
    assert json.loads(written) == printed
    assert str(tmp_path) not in written
    assert printed["command"][2] == "two.jsonl"
