"""The folder of results: checked before any run, made with the first file, never a mix."""

from pathlib import Path

import pytest

from kvtier.cli import replay_output
from kvtier.cli.app import run
from kvtier.errors import ConfigError
from kvtier.report import check_folder, write_results

from .test_interrupt import SHORT

BATCH = (*SHORT[:2], "--programs", "3", "--policy", "lru", "--no-bound")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_an_earlier_replay_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.png").touch()
    assert run(["replay", *SHORT, "--out", "out"]) == 0
    assert "places.png" in names(tmp_path / "out")
    assert run(["replay", *BATCH, "--out", "out"]) == 0
    assert names(tmp_path / "out") == [
        *("mine.png", "overview.png", "overview.svg", "results.json", "window.png", "window.svg"),
    ]


def test_plots_that_fail_leave_no_plot_of_an_earlier_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "out/overview.png")

    monkeypatch.chdir(tmp_path)
    assert run(["replay", *SHORT, "--out", "out"]) == 0
    monkeypatch.setattr(replay_output, "write_plots", fail)
    assert run(["replay", *SHORT, "--out", "out"]) == 2
    assert names(tmp_path / "out") == ["results.json"]
    assert capsys.readouterr().err.endswith("error: out/overview.png: No space left on device\n")


@pytest.mark.parametrize("name", ["results.json", "overview.png", "window.svg"])
def test_a_folder_in_the_way_of_a_file_is_found_before_any_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / name).mkdir(parents=True)
    assert run(["replay", *SHORT, "--out", "out"]) == 2
    assert capsys.readouterr().err == (
        f"error: --out out: a folder named {name} is in the way; move it away\n"
    )
    assert names(tmp_path / "out") == [name]


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; name another folder"):
        check_folder(tmp_path / "file" / "a" / "b")
    assert names(tmp_path) == ["file"]


def test_results_that_cannot_be_put_in_place_name_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match="Is a directory") as caught:
        write_results(tmp_path, b"{}")
    assert caught.value.filename == str(tmp_path / "results.json")
    assert names(tmp_path) == ["results.json"]


def test_a_tilde_is_the_home_folder_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.toml").write_text("[replay]\ndram_ratio = 0.5\n")
    synth = ["trace", "synth", "--profile", "batch-react", "--programs", "2"]
    assert run([*synth, "--out", "~/two.jsonl"]) == 0
    short = ("--policy", "lru", "--no-bound", "--duration", "60s", "--programs", "2")
    command = ["replay", "~/two.jsonl", *short, "--out", "~/out"]
    monkeypatch.setenv("KVTIER_CONFIG", "~/k.toml")
    assert run(command) == 0
    by_variable = (tmp_path / "out" / "results.json").read_text()
    monkeypatch.delenv("KVTIER_CONFIG")
    assert run([*command, "--config", "~/k.toml"]) == 0
    by_flag = (tmp_path / "out" / "results.json").read_text()
    assert '"dram_ratio": 0.5' in by_variable
    assert '"dram_ratio": 0.5' in by_flag
    assert names(tmp_path) == ["k.toml", "out", "two.jsonl"]
    capsys.readouterr()
    assert run(["trace", "info", "~/two.jsonl"]) == 0


def test_the_bound_alone_is_drawn_as_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--profile", "batch-react", "--mode", "closed", "--programs", "2"]
    code = run(["replay", *arguments, "--policy", "infinite", "--duration", "60s", "--out", "out"])
    out, err = capsys.readouterr()
    assert code == 0
    assert "Only the bound ran, infinite HBM" in out
    assert len(err.splitlines()) == 2
    for plot in ("overview", "places"):
        assert "<!-- infinite -->" in (tmp_path / "out" / f"{plot}.svg").read_text()
