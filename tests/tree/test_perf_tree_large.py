"""The benchmark of a large tree: what it holds, and that both tiers stay full."""

from __future__ import annotations

from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import Tier
from perf.tree_large import Large, measure


def test_rounds_leave_both_tiers_as_full_as_they_found_them() -> None:
    large = Large(num_pages=4_000, num_programs=40)
    held = {tier: large.tree.pages[tier].total for tier in Tier}
    assert held[Tier.HBM] >= 4_000
    assert held[Tier.DRAM] >= 1_900
    for _ in range(20):
        large.round()
        assert all(large.tree.pages[tier].total >= held[tier] for tier in Tier)
    check_integrity(large.tree)


def test_every_call_has_its_tail() -> None:
    records = measure(num_pages=2_000, num_programs=20, num_rounds=3)
    calls = [record["case"].removeprefix("tree_large_") for record in records]
    assert calls == ["match", "relabel", "evict_hbm", "evict_dram"]
    assert all(r["n"] == 3 and 0 < r["us_p50"] <= r["us_p99"] <= r["us_max"] for r in records)
