"""The benchmark of the runtime: a record per row size, whose target begins at 32 KiB."""

from __future__ import annotations

from perf.runtime import Case, measure, render


def test_a_record_per_row_size_with_its_ratio() -> None:
    records = list(measure(num_tokens=64, num_rounds=2))
    assert [record["row_bytes"] >> 10 for record in records] == [8, 32, 64]
    for record in records:
        assert record["bytes"] == 64 // 16 * 16 * record["row_bytes"]
        assert 0 < record["ratio_min"] <= record["ratio"] <= record["ratio_max"]
        assert all(ms > 0 for ms in record["ms"].values())
        assert record["met"] in ((None,) if record["row_bytes"] < 32 << 10 else (True, False))
    assert render(records).row_count == 3


def test_a_page_of_a_segment_is_a_row() -> None:
    case = Case(row_bytes=32 << 10, num_tokens=160)
    assert case.layout.page_bytes() == 16 * (32 << 10)
    assert case.num_bytes == 10 * case.layout.page_bytes()
