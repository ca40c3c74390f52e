"""The transfer benchmark: its load, its two movers, and what it says of targets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

from kvtier.errors import SimulationError
from perf.memory_copier import MemoryCopier
from perf.transfer_link import SCENES, run
from perf.transfer_load import Load, Outcome, percentile_us
from perf.transfers import judge

ONE_WAY, _, RANKS = SCENES
CHUNK_S = 18 * 917_504 / (0.974 * 50e9)
"""18 pages of 16 tokens of Qwen2.5-7B, staged, alone on the link."""


@pytest.mark.parametrize("num_jobs", [1, 256])
def test_with_the_window_the_link_is_full_and_an_urgent_page_waits_for_one_chunk(
    num_jobs: int,
) -> None:
    idle = run(ONE_WAY, 0, "aimd", 1.0, seed=0)
    busy = run(ONE_WAY, num_jobs, "aimd", 1.0, seed=0)
    assert busy.goodput_bytes_per_s >= 0.99 * 0.974 * 50e9
    bound_us = percentile_us(idle.latencies_s, 99.0) + CHUNK_S * 1e6
    assert percentile_us(busy.latencies_s, 99.0) <= bound_us


def test_without_it_an_urgent_page_waits_for_all_jobs_and_goodput_is_the_same() -> None:
    load = run(ONE_WAY, 16, "none", 1.0, seed=0)
    assert load.goodput_bytes_per_s == pytest.approx(0.974 * 50e9, rel=0.01)
    job_s = load.load.job_pages * load.load.page_bytes / (0.974 * 50e9)
    assert percentile_us(load.latencies_s, 50.0) > 15 * job_s * 1e6


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    once, again, other = (run(ONE_WAY, 2, "aimd", 0.2, seed) for seed in (3, 3, 4))
    assert once == again
    assert once.latencies_s != other.latencies_s


def test_the_idle_link_of_a_shared_scene_has_the_others_copies() -> None:
    alone, shared = (run(scene, 0, "aimd", 0.5, seed=0) for scene in (ONE_WAY, RANKS))
    assert alone.goodput_bytes_per_s < 0.01 * 50e9
    assert shared.goodput_bytes_per_s >= 0.97 * 0.974 * 50e9
    ratio = percentile_us(shared.latencies_s, 50.0) / percentile_us(alone.latencies_s, 50.0)
    assert ratio == pytest.approx(4.0, rel=0.01)


def test_the_other_process_copies_in_order_and_says_so() -> None:
    with MemoryCopier(1 << 20) as copier:
        assert copier.ended(0.0) == 0
        assert not copier.same(0, 4096, 8192)
        copier.submit(0, 4096, 8192)
        copier.submit(65_536, 65_536, 1)
        left = 2
        while left:
            left -= copier.ended(10.0)
        assert copier.same(0, 4096, 8192)
        assert not copier.same(65_536, 65_536, 2)


def test_a_copy_outside_the_memory_ends_the_other_process_and_is_noticed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with MemoryCopier(1 << 20) as copier:
        copier.submit(0, 1 << 20, 4096)
        with pytest.raises(SimulationError, match="has ended"):
            copier.ended(30.0)
    assert "could not broadcast" in capfd.readouterr().err


def outcome(goodput_gb_per_s: float, latency_us: float, chunk_us: float) -> Outcome:
    latencies, chunks = [latency_us * 1e-6] * 100, [chunk_us * 1e-6] * 100
    return Outcome(Load(1, 1000, 1, {}, "aimd"), goodput_gb_per_s * 1e9, latencies, chunks)


@pytest.mark.parametrize(
    ("goodput", "latency_us", "met"),
    [(9.0, 20.1, True), (8.9, 20.1, False), (9.0, 20.2, False), (10.0, 1.0, True)],
)
def test_a_row_meets_its_target_by_goodput_and_by_latency(
    goodput: float, latency_us: float, met: bool
) -> None:
    # 20 us on the idle mover, and 0.1 us for a chunk of the job without a window.
    runs = {
        (0, "aimd"): [outcome(0.1, 20.0, 7.0)],
        (1, "aimd"): [outcome(goodput, latency_us, 9.0)],
        (1, "none"): [outcome(10.0, 500.0, 0.1)],
    }
    idle, mine, other = judge(runs, {"simulated": True})
    assert idle["bound_us"] == 20.1
    assert (idle["met"], mine["met"], other["met"]) == (None, met, False)
