"""The command line as a user meets it: output, exit codes, one-line errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.cli.drawing import draw

ROOT = Path(__file__).resolve().parents[2]


def kvtier(
    *arguments: str, cwd: Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_is_printed(tmp_path: Path) -> None:
    result = kvtier("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"kvtier {__version__}\n")


def test_config_show_prints_values_with_their_origins(tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("[engine]\npage_size = 32\n")
    environ = {"KVTIER_REPLAY__SEED": "7"}
    result = kvtier("config", "show", "--config", "k.toml", "--json", cwd=tmp_path, environ=environ)
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}
    assert rows["engine.page_size"] == (32, "file k.toml")
    assert rows["replay.seed"] == (7, "environment KVTIER_REPLAY__SEED")
    assert rows["scheduler.tick_s"] == (5.0, "default")


def test_config_show_prints_a_table_with_sources(tmp_path: Path) -> None:
    result = kvtier("config", "show", cwd=tmp_path)
    assert result.returncode == 0
    line = next(row for row in result.stdout.splitlines() if "admission.alpha" in row)
    assert "2.0" in line
    assert "default" in line
    assert "CONCUR Eq 1" in line


def test_config_reference_prints_the_documented_page(tmp_path: Path) -> None:
    result = kvtier("config", "reference", cwd=tmp_path)
    assert result.stdout == (ROOT / "docs" / "config.md").read_text(encoding="utf-8")


def test_a_synthetic_trace_can_be_looked_into(tmp_path: Path) -> None:
    made = kvtier(
        *("trace", "synth", "--profile", "batch-react", "--programs", "3"),
        *("--seed", "1", "--out", "t.jsonl"),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("t.jsonl: 3 programs, ")
    shown = kvtier("trace", "info", "t.jsonl", cwd=tmp_path)
    assert "programs" in shown.stdout
    summary = json.loads(kvtier("trace", "info", "t.jsonl", "--json", cwd=tmp_path).stdout)
    assert summary["programs"] == 3
    assert made.stdout.endswith(f", {summary['steps']} steps\n")


def test_trace_info_writes_its_numbers_in_one_way_and_the_digest_whole(tmp_path: Path) -> None:
    synth = ("trace", "synth", "--profile", "coding-autonomous", "--programs", "40", "--out", "t")
    assert kvtier(*synth, cwd=tmp_path).returncode == 0
    out = kvtier("trace", "info", "t", cwd=tmp_path).stdout
    digest = json.loads(kvtier("trace", "info", "t", "--json", cwd=tmp_path).stdout)["sha256"]
    assert digest in out
    rest = out.replace(digest, "")
    assert re.search(r"│ steps +│ \d,\d{3} ", rest)
    assert re.search(r"(?<![.\d])\d{4}", rest) is None
    assert re.search(r"\de[+-]\d", rest) is None
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_long_draw_is_announced(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    import kvtier.traces

    monkeypatch.setattr(kvtier.traces, "synth", lambda *arguments: arguments)
    assert draw("batch-react", 4_999, 0) == ("batch-react", 4_999, 0)
    assert capsys.readouterr().err == ""
    draw("batch-react", 100_000, 7)
    assert capsys.readouterr().err == "drawing 100,000 programs of batch-react, seed 7\n"


def test_the_seed_of_a_trace_comes_from_the_configuration(tmp_path: Path) -> None:
    synth = ("trace", "synth", "--profile", "batch-react", "--programs", "2", "--out")
    kvtier(*synth, "flag.jsonl", "--seed", "5", cwd=tmp_path)
    kvtier(*synth, "variable.jsonl", cwd=tmp_path, environ={"KVTIER_REPLAY__SEED": "5"})
    kvtier(*synth, "default.jsonl", cwd=tmp_path)
    flag, variable, default = (
        (tmp_path / f"{name}.jsonl").read_bytes() for name in ("flag", "variable", "default")
    )
    assert flag == variable != default


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("Missing command",)),
        (("replya",), ("No such command 'replya'",)),
        (("config",), ("Missing command",)),
        (("config", "show", "--jsn"), ("No such option: --jsn", "see kvtier config show --help")),
        (("config", "show", "--config", "-"), ("--config -", "streams")),
        (("config", "show", "--config", ""), ("--config is empty",)),
        (("trace", "info", ""), ("PATH is empty",)),
        (("trace", "info", "-"), ("PATH -", "streams are neither read nor written")),
        (
            ("trace", "synth", "--profile", "batch-react", "--programs", "1", "--out", "-"),
            ("--out -", "streams are neither read nor written"),
        ),
        (
            ("trace", "synth", "--profile", "batch-react", "--programs", "1000001", "--out", "t"),
            ("--programs", "1000000"),
        ),
        (
            (
                *("trace", "synth", "--profile", "batch-react", "--programs", "900000"),
                *("--out", "empty.jsonl/t"),
            ),
            ("empty.jsonl/t", "cannot be written", "name another file"),
        ),
        (
            (
                *("trace", "synth", "--profile", "batch-react", "--programs", "1"),
                *("--seed", "-1", "--out", "t"),
            ),
            ("--seed", "greater than or equal to 0"),
        ),
        (("config", "show", "--config", "none.toml"), ("none.toml", "No such file")),
        (("trace", "info"), ("Missing argument",)),
        (("trace", "info", "none.jsonl"), ("none.jsonl",)),
        (("trace", "info", "empty.jsonl"), ("empty.jsonl", "empty")),
        (
            ("trace", "synth", "--profile", "batch-reac", "--programs", "1", "--out", "t"),
            ("unknown profile 'batch-reac'", "'batch-react'"),
        ),
        (
            ("trace", "synth", "--profile", "batch-react", "--programs", "0", "--out", "t"),
            ("programs",),
        ),
        (
            ("trace", "synth", "--profile", "batch-react", "--programs", "x", "--out", "t"),
            ("--programs", "integer"),
        ),
        (
            ("trace", "synth", "--profile", "batch-react", "--programs", "1", "--out", "no/t"),
            ("no/t",),
        ),
    ],
)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    result = kvtier(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == []


def test_a_wrong_variable_gives_one_line_and_exit_code_2(tmp_path: Path) -> None:
    environ = {"KVTIER_REPLAY__SED": "1"}
    result = kvtier("config", "show", cwd=tmp_path, environ=environ)
    assert result.returncode == 2
    assert result.stderr == (
        "error: unknown setting 'KVTIER_REPLAY__SED' in the environment; "
        "nearest: 'KVTIER_REPLAY__SEED'\n"
    )


@pytest.mark.parametrize("arguments", [("--help",), ("config", "--help"), ("trace", "--help")])
def test_help_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = kvtier(*arguments, cwd=tmp_path)
    assert result.returncode == 0
    assert "Usage: kvtier" in result.stdout
