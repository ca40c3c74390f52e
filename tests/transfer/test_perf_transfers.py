"""The benchmark of transfers under load: what it claims, judges and writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perf.transfer_load import Load, Outcome
from perf.transfers import FULL, Plan, judge, measure, render

ROOT = Path(__file__).parents[2]
PLAN = Plan(num_jobs=(1, 16), link_runs=1, link_s=1.0, memory_runs=1, memory_s=0.2)
RESULTS = sorted((ROOT / "perf/results/transfers").glob("*.jsonl"))
DOCS = (ROOT / "docs/transfers.md").read_text(encoding="utf-8")


def results() -> list[dict[str, Any]]:
    """The newest committed run."""
    return [json.loads(line) for line in RESULTS[-1].read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def scenes() -> list[list[dict[str, Any]]]:
    return list(measure(PLAN, ("link",)))


def test_on_the_modelled_link_the_window_meets_the_target_at_any_load(
    scenes: list[list[dict[str, Any]]],
) -> None:
    assert [scene[0]["scene"] for scene in scenes] == ["one way", "both ways", "4 ranks, one way"]
    for scene in scenes:
        assert [(r["num_jobs"], r["window"]) for r in scene] == [
            (0, "aimd"),
            *((count, window) for count in PLAN.num_jobs for window in ("aimd", "none")),
        ]
        for record in scene[1:]:
            assert record["simulated"] is True
            assert record["share_of_best"] >= 0.9
            assert record["met"] is (record["window"] == "aimd")


def test_without_a_window_the_urgent_page_waits_for_all_that_is_queued(
    scenes: list[list[dict[str, Any]]],
) -> None:
    for scene in scenes:
        few, many = (r["urgent_p99_us"] for r in scene if r["window"] == "none")
        assert many > 4 * few


def outcome(goodput: float, latency_s: float, chunk_s: float = 100e-6) -> Outcome:
    load = Load(1 << 20, 4, 8, {}, "aimd")
    return Outcome(load, goodput, [latency_s] * 3, [chunk_s] * 3)


@pytest.mark.parametrize(
    ("goodput", "latency_us", "met"),
    [(9.1e9, 140, True), (8.9e9, 140, False), (10e9, 111, True), (10e9, 151, False)],
)
def test_a_row_is_judged_by_the_best_goodput_and_the_idle_mover(
    goodput: float, latency_us: float, met: bool
) -> None:
    outcomes = {
        (0, "aimd"): [outcome(1e9, 50e-6)],
        (1, "aimd"): [outcome(goodput, latency_us * 1e-6)],
        (1, "none"): [outcome(10e9, 900e-6)],
    }
    idle, row, free = judge(outcomes, {"mover": "link", "scene": "s", "simulated": True})
    assert idle["met"] is None
    assert row["bound_us"] == pytest.approx(150)
    assert row["met"] is met
    assert free["met"] is False
    assert "SIMULATED" in str(render([idle, row, free]).title)


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perf.transfers", "--json", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_the_committed_run_is_whole_and_meets_what_the_guide_says() -> None:
    rows = results()
    for scene in {(row["mover"], row["scene"]) for row in rows}:
        mine = [row for row in rows if (row["mover"], row["scene"]) == scene]
        assert len(mine) == 1 + 2 * len(FULL.num_jobs)
        assert all(row["simulated"] is (scene[0] == "link") for row in mine)
    assert sum(row["mover"] == "link" for row in rows) == 3 * (1 + 2 * len(FULL.num_jobs))
    window = [row for row in rows if row["window"] == "aimd" and row["num_jobs"]]
    assert all(row["met"] for row in window if row["mover"] == "link")


def test_the_guides_tables_are_those_of_the_committed_run() -> None:
    """Rows `| jobs | GB/s | p99 us | GB/s without | p99 without |` under each scene's heading."""
    for scene in {row["scene"] for row in results()}:
        mine = {(r["num_jobs"], r["window"]): r for r in results() if r["scene"] == scene}
        heading = DOCS.index(f"**{scene}**")
        for count in FULL.num_jobs:
            cells = [f"{count}"]
            for window in ("aimd", "none"):
                row = mine[count, window]
                cells += [f"{row['goodput_gb_per_s']:.1f}", f"{row['urgent_p99_us']:,.0f}"]
            line = re.escape("| " + " | ".join(cells) + " |")
            assert re.search(line, DOCS[heading:]), (scene, cells)
