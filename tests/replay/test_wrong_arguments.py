"""Whatever is wrong with a replay is said in one line before anything runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.app import run

PROFILE = ("--profile", "coding-autonomous")

CASES = {
    "no trace": ((), ("PATH", "--profile", "neither")),
    "two traces": (("empty.jsonl", *PROFILE), ("PATH", "--profile", "both")),
    "missing file": (("none.jsonl",), ("none.jsonl", "no such file")),
    "empty file": (("empty.jsonl",), ("empty.jsonl", "empty")),
    "no trace in the file": (("other.json",), ("other.json", "kvtier reads")),
    "unknown policy": ((*PROFILE, "--policy", "lru,mro"), ("policy 'mro'", "'mori'")),
    "unknown shorthand": ((*PROFILE, "--policy", "mori+concurr"), ("policy", "mori+concurr")),
    "empty policy": ((*PROFILE, "--policy", "lru,"), ("--policy", "empty name")),
    "unknown admission": ((*PROFILE, "--admission", "fix"), ("admission 'fix'", "fixed:N")),
    "admission of nobody": ((*PROFILE, "--admission", "fixed:0"), ("fixed:0", "at least 1")),
    "unknown model": ((*PROFILE, "--model", "Qwen9"), ("model 'Qwen9'", "Qwen2.5-7B")),
    "unknown GPU": ((*PROFILE, "--gpu", "H20"), ("GPU 'H20'", "H200")),
    "unknown profile": (("--profile", "coding"), ("profile 'coding'", "coding-autonomous")),
    "unknown flag": ((*PROFILE, "--modle", "x"), ("--modle", "--model")),
    "unknown mode": ((*PROFILE, "--mode", "closd"), ("mode 'closd'", "closed")),
    "unknown copy path": ((*PROFILE, "--copy-path", "dma"), ("copy path 'dma'", "batch-dma")),
    "unknown gaps": ((*PROFILE, "--gaps", "human"), ("'human'", "capped, tool, raw")),
    "model too large": ((*PROFILE, "--model", "DeepSeek-V3"), ("671.0 GB", "--tp 8")),
    "tp that does not divide": ((*PROFILE, "--tp", "3"), ("tp=3", "28")),
    "no duration": ((*PROFILE, "--duration", "20x"), ("--duration '20x'", "20m")),
    "duration of nothing": ((*PROFILE, "--duration", "0s"), ("duration_s", "> 0")),
    "no seed": ((*PROFILE, "--seed", "0,x"), ("--seed '0,x'", "whole numbers")),
    "seed twice": ((*PROFILE, "--seed", "1,1"), ("twice",)),
    "seed and seeds": ((*PROFILE, "--seed", "1", "--seeds", "2"), ("--seeds", "one of them")),
    "negative seed": ((*PROFILE, "--seed", "-1"), ("--seed '-1'", "from 0")),
    "seed without end": ((*PROFILE, "--seed", "9" * 5000), ("--seed", "2^63")),
    "empty seed": ((*PROFILE, "--seed", ""), ("--seed ''", "is empty")),
    "empty admission": ((*PROFILE, "--admission", " "), ("--admission ' '", "is empty")),
    "policy twice": ((*PROFILE, "--policy", "lru,mori,lru"), ("--policy", "'lru' twice")),
    "admission twice": ((*PROFILE, "--admission", "none,none"), ("'none' twice",)),
    "too many programs": ((*PROFILE, "--programs", "100001"), ("--programs", "100000")),
    "too many workers": ((*PROFILE, "--workers", "1025"), ("--workers", "1024")),
    "too many seeds": ((*PROFILE, "--seeds", "1001"), ("--seeds", "1000")),
    "too long a list of seeds": (
        (*PROFILE, "--seed", ",".join(map(str, range(1001)))),
        ("--seed names 1,001", "1,000 at most"),
    ),
    "too long": ((*PROFILE, "--duration", "721h"), ("duration_s=2.5956e+06", "720h")),
    "too short": ((*PROFILE, "--duration", "0.5s"), ("duration_s=0.5", "1s")),
    "endless": ((*PROFILE, "--duration", "9" * 400), ("duration_s",)),
    "empty path": (("",), ("PATH is empty",)),
    "empty folder": ((*PROFILE, "--out", ""), ("--out is empty",)),
    "empty configuration": ((*PROFILE, "--config", ""), ("--config is empty",)),
    "standard input": (("-",), ("PATH -", "streams are neither read nor written")),
    "standard output": ((*PROFILE, "--out", "-"), ("--out -", "streams")),
    "unknown home": ((*PROFILE, "--out", "~nobody-here/x"), ("--out ~nobody-here", "no such user")),
    "missing model": (
        (*PROFILE, "--model", "models/x"),
        ("models/x", "no such file", "Qwen"),
    ),
    "missing model at home": ((*PROFILE, "--model", "~/none-here"), ("none-here", "no such file")),
    "missing config.json": ((*PROFILE, "--model", "none.json"), ("none.json", "No such file")),
    "no model": ((*PROFILE, "--model", "other.json"), ("other.json", "model_type is missing")),
    "help of the command": ((*PROFILE, "--modle", "x"), ("see kvtier replay --help",)),
    "a device": (("zero",), ("zero", "a device", "not read")),
    "a FIFO": (("fifo",), ("fifo", "a FIFO", "not read")),
    "nobody": ((*PROFILE, "--programs", "0"), ("--programs", "1")),
    "negative DRAM": ((*PROFILE, "--dram-ratio", "-1"), ("dram_ratio", ">= 0")),
    "cap without capping": ((*PROFILE, "--gaps", "raw", "--gap-cap", "5s"), ("--gap-cap", "raw")),
    "duration of a batch": (("--profile", "batch-react", "--duration", "5m"), ("batch mode",)),
    "open without arrivals": ((*PROFILE, "--mode", "open"), ("open mode", "arrivals")),
    "missing configuration": ((*PROFILE, "--config", "none.toml"), ("none.toml",)),
    "results in a file": ((*PROFILE, "--out", "empty.jsonl"), ("--out", "is a file")),
    "results below a file": ((*PROFILE, "--out", "empty.jsonl/x"), ("--out", "cannot be written")),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an empty file, one that is no trace, a device and a FIFO."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.json").write_text('{"a": 1}\n')
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), CASES.values(), ids=CASES.keys())
def test_a_wrong_argument_gives_one_line_and_exit_code_2(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    code = run(["replay", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_process_ends_with_exit_code_2_and_no_traceback(folder: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", "none.jsonl"],
        cwd=folder,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "error: none.jsonl: no such file or folder; check the path\n"
