"""The benchmark of the engine's own cost: a record per case, and what it says of targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import SimulationError
from perf import transfer_cost


def test_each_case_is_one_record_with_its_target() -> None:
    records = list(transfer_cost.measure(num_rounds=1, num_jobs=3))
    assert {record["case"].removeprefix("transfer_") for record in records} == {
        "large_job",
        "descriptors",
        "job",
        "future",
        "chunk",
        "idle_poll",
        "busy_poll",
    }
    assert all(record["n"] == 1 and not record["simulated"] for record in records)
    assert transfer_cost.render(records).row_count == len(records)


@pytest.mark.parametrize(
    ("median_us", "target_us", "expected"),
    [(5.0, 5.0, "met"), (5.1, 5.0, "missed"), (5.1, None, "-")],
)
def test_the_median_decides(median_us: float, target_us: float | None, expected: str) -> None:
    assert transfer_cost.met({"median_us": median_us, "target_us": target_us}) == expected


def test_jobs_that_are_not_done_stop_the_benchmark() -> None:
    refused = pytest.raises(SimulationError, match="not all are done")
    with transfer_cost._engine(transfer_cost.NothingBackend()) as engine, refused:
        transfer_cost._require_done(engine, 1)


def test_records_are_appended_as_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    argv = ["transfer_cost", "--quick", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", argv)
    transfer_cost.main()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 7
    assert "idle poll" in capsys.readouterr().out
