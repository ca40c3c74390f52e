"""Which runs a command line asks for, and with which settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cli.replay import DEFAULT_POLICIES
from kvtier.cli.replay_plan import ReplayFlags, list_pairs, make_plan, parse_seconds
from kvtier.errors import ConfigError
from kvtier.sim import Mode

FLAGS = ReplayFlags(
    path=None,
    profile="coding-autonomous",
    policy="lru",
    admission="none",
    model=None,
    gpu=None,
    tp=None,
    workers=1,
    programs=4,
    mode=None,
    duration=None,
    dram_ratio=None,
    gaps=None,
    gap_cap=None,
    seed=None,
    seeds=None,
    copy_path="staged",
    bound=True,
    config=None,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("20m", 1200.0), ("1h", 3600.0), ("45", 45.0), ("1.5m", 90.0)],
)
def test_times_are_written_with_their_unit_or_as_seconds(text: str, seconds: float) -> None:
    assert parse_seconds("--duration", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "20 minutes", "-5s", "1e3", "nan", "inf", "1h30m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        parse_seconds("--duration", text)


def test_the_default_policies_run_with_the_bound_last() -> None:
    assert list_pairs(DEFAULT_POLICIES, "none", bound=True) == [
        ("lru", "none"),
        ("lru+offload", "none"),
        ("lru+offload-wb", "none"),
        ("elapsed", "none"),
        ("mori", "none"),
        ("mori", "concur"),
        ("infinite", "none"),
    ]


def test_an_attached_admission_wins_and_nothing_runs_twice() -> None:
    pairs = list_pairs("lru,mori+concur,mori", "concur,fixed:8", bound=False)
    assert pairs == [
        ("lru", "concur"),
        ("lru", "fixed:8"),
        ("mori", "concur"),
        ("mori", "fixed:8"),
    ]


def test_the_bound_can_be_asked_for_by_name_and_runs_once() -> None:
    assert list_pairs("infinite,lru", "none,concur", bound=True)[-1] == ("infinite", "none")
    assert list_pairs("infinite", "concur", bound=False) == [("infinite", "none")]


def test_every_seed_gets_every_pair() -> None:
    plan = make_plan(replace(FLAGS, policy="lru,mori", seed="3,5"))
    runs = [(run.seed, run.policy) for run in plan.runs]
    assert runs == [(s, p) for s in (3, 5) for p in ("lru", "mori", "infinite")]


def test_a_number_of_seeds_counts_from_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_REPLAY__SEED", "7")
    plan = make_plan(replace(FLAGS, seeds=3))
    assert list(plan.traces) == [7, 8, 9]


def test_a_profile_draws_anew_for_each_seed_and_a_run_depends_on_its_own_seed_alone() -> None:
    both, second = (make_plan(replace(FLAGS, seed=seeds)) for seeds in ("0,1", "1"))
    assert both.traces[0].sha256 != both.traces[1].sha256
    assert both.traces[1] == second.traces[1]


def test_the_batch_profile_brings_its_own_defaults_and_flags_override_them() -> None:
    plan = make_plan(replace(FLAGS, profile="batch-react", programs=None, gpu="H200"))
    first = plan.first
    assert (first.mode, first.num_programs, first.tp) == (Mode.BATCH, 256, 2)
    assert (first.model.name, first.gpu.name) == ("Qwen3-32B", "H200")
    assert plan.profile_defaults == ("--mode", "--model", "--tp", "--programs")


def test_flags_environment_and_file_reach_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.toml"
    path.write_text(
        "[scheduler]\nwindow_k = 3\n[engine]\nchunk_tokens = 2048\npage_size = 32\n"
        "[replay]\ngap_cap_s = 10\nduration_s = 50\n"
    )
    monkeypatch.setenv("KVTIER_ADMISSION__ALPHA", "4")
    monkeypatch.setenv("KVTIER_REPLAY__DURATION_S", "70")
    first = make_plan(replace(FLAGS, config=path, duration="90s", dram_ratio=2.0)).first
    assert first.scheduler.window_k == 3
    assert (first.engine.chunk_tokens, first.page_size) == (2048, 32)
    assert first.concur.alpha == 4.0
    assert (first.gap_cap_s, first.duration_s, first.dram_ratio) == (10.0, 90.0, 2.0)


def test_open_mode_takes_the_programs_of_the_trace(tmp_path: Path) -> None:
    from kvtier.traces import synth, write_native

    path = tmp_path / "five.jsonl"
    write_native(synth("batch-react", 5, 0), path)
    plan = make_plan(replace(FLAGS, path=path, profile=None, programs=None, mode="open"))
    assert plan.first.num_programs == 5
