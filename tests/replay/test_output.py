"""Tables, verdict and plots."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kvtier.report import group_runs, verdict
from kvtier.report.table import number, scaled

from .replays import Replay


def run(policy: str, seed: int, tok_per_s: float, **more: Any) -> dict[str, Any]:
    """A record with what a verdict looks at."""
    record = {"policy": policy, "admission": "none", "seed": seed, "partial": False}
    figures = {"output_tok_per_s": tok_per_s, "makespan_s": None, "ttft_p99_s": None}
    return {**record, **figures, "num_unanswered": 0, **more}


def say(*runs: dict[str, Any], batch: bool = False) -> str:
    return verdict(group_runs(runs), batch=batch)


def test_the_table_fits_100_columns_and_names_all_runs(closed: Replay) -> None:
    lines = closed.process.stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert "SIMULATED" in lines[0]
    for word in ("lru", "lru+offload-wb", "mori", "infinite"):
        assert sum(line.split()[:1] == [word] for line in lines) == 2
    assert "makespan" not in closed.process.stdout
    assert "\x1b" not in closed.process.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.054, "0.05"), (9.996, "10.0"), (99.97, "100"), (1234.5, "1,234")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(950.0, "950"), (47_100.0, "47.1k"), (1.23e6, "1.23M"), (2.79e12, "2.79T")]
)
def test_large_figures_have_a_prefix(value: float, text: str) -> None:
    assert scaled(value) == text


def test_the_header_names_trace_machine_load_and_seeds(closed: Replay) -> None:
    header = closed.process.stdout.split("\n\n")[0]
    words = ("coding-autonomous-n60-s0", "Qwen2.5-7B", "H200-80GB", "30 programs", "seeds 0, 1")
    assert [w for w in (*words, "tokens of KV in HBM", "capped at 60 s") if w not in header] == []


def test_progress_is_a_line_per_run_where_there_is_no_terminal(closed: Replay) -> None:
    lines = closed.process.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"run {i}/8" for i in range(1, 9)]
    assert "simulated s per s" in lines[0]
    assert lines[-1].startswith("written to out: results.json")


def test_a_batch_has_its_makespan_and_says_its_defaults(batch: Replay) -> None:
    assert batch.process.returncode == 0, batch.process.stderr
    out = batch.process.stdout
    assert "makespan" in out
    assert "--mode --model --gpu --tp: defaults of profile batch-react" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    makespans = {run["admission"]: run["makespan_s"] for run in batch.results["runs"]}
    assert all(seconds > 0 for seconds in makespans.values())


@pytest.mark.parametrize("name", ["overview", "places"])
def test_plots_are_images_that_say_simulated(closed: Replay, name: str) -> None:
    check_image(closed.folder / name)


def test_a_batch_shows_its_window_in_place_of_places(batch: Replay) -> None:
    check_image(batch.folder / "window")
    assert not (batch.folder / "places.png").exists()


def check_image(path: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(path.with_suffix(".png"))
    assert min(pixels.shape[:2]) > 300
    assert float(np.std(pixels)) > 0.01
    text = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    # Words are drawn as outlines, each with its text in a comment.
    assert "<!-- Simulated:" in text


def test_the_verdict_says_by_how_much_over_whom() -> None:
    text = say(run("lru", 0, 100.0), run("mori", 0, 150.0), run("lru+offload", 0, 120.0))
    assert text == (
        "mori has the most output: 150 tok/s, 25 % ahead of lru+offload (120) and 50 % ahead of "
        "lru (100)."
    )


def test_figures_within_5_percent_are_called_equal() -> None:
    assert say(run("lru", 0, 100.0), run("mori", 0, 104.0)) == (
        "All are within 5 % of mori (104 tok/s)."
    )
    text = say(run("mori", 0, 104.0), run("elapsed", 0, 100.0), run("lru", 0, 80.0))
    assert text.startswith("mori has the most output: 104 tok/s (elapsed within 5 %), 30 % ahead")


def test_the_bound_never_wins() -> None:
    text = say(run("lru", 0, 100.0), run("mori", 0, 150.0), run("infinite", 0, 200.0))
    assert text.startswith("mori has the most output")
    assert text.endswith("mori reaches 75 % of the bound, infinite HBM (200).")


def test_a_bound_that_is_passed_is_not_called_one() -> None:
    text = say(run("mori", 0, 150.0), run("infinite", 0, 100.0))
    assert text == "mori: 150 tok/s. Infinite HBM without admission is no bound here: 100 tok/s."


def test_overlapping_seeds_are_said_to_overlap() -> None:
    text = say(
        *(run("lru", seed, value) for seed, value in ((0, 90.0), (1, 130.0))),
        *(run("mori", seed, value) for seed, value in ((0, 120.0), (1, 160.0))),
    )
    assert "its range over seeds overlaps that of lru" in text


def test_a_batch_is_won_by_the_shortest_makespan() -> None:
    runs = [run("lru", 0, 1.0, makespan_s=300.0), run("mori", 0, 1.0, makespan_s=200.0)]
    assert say(*runs, batch=True) == (
        "mori has the shortest makespan: 200 s, 50 % ahead of lru (300)."
    )


def test_a_long_tail_of_the_best_or_of_mori_is_told_of() -> None:
    text = say(
        run("elapsed", 0, 150.0, ttft_p99_s=50.0, num_unanswered=1),
        run("mori", 0, 149.0, ttft_p99_s=142.0, num_unanswered=7),
        run("lru", 0, 100.0, ttft_p99_s=23.5),
        run("infinite", 0, 160.0, ttft_p99_s=0.5),
    )
    assert text.endswith(
        "The price is the tail: p99 TTFT is elapsed 50.0 s, mori 142 s, against 23.5 s of lru; "
        "requests without an answer at the end: elapsed 1, mori 7, lru 0."
    )


def test_a_tail_of_twice_the_shortest_is_not_told_of() -> None:
    text = say(run("mori", 0, 150.0, ttft_p99_s=2.0), run("lru", 0, 100.0, ttft_p99_s=1.0))
    assert "tail" not in text


def test_a_bound_without_policies_is_said_to_be_alone() -> None:
    assert say(run("infinite", 0, 160.0)) == (
        "Only the bound ran, infinite HBM (160 tok/s): name policies to compare with --policy."
    )


def test_partial_runs_are_not_compared() -> None:
    cut = run("mori", 0, 500.0, partial=True)
    assert say(run("lru", 0, 100.0), cut) == "lru: 100 tok/s."
    assert say(cut) == "No policy ran to its end, so there is nothing to compare."
