"""Policies and admissions by name."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError, KvtierError, UnknownNameError
from kvtier.scheduling import (
    ADMISSIONS,
    POLICIES,
    Concur,
    ConcurSettings,
    Elapsed,
    IdlenessRing,
    Lru,
    Mori,
    SchedulerSettings,
    admission_factory,
    build,
    policy,
    split_policy,
)

MADE = ("none", "fixed:3", "request-cap:2", "concur", "concur+")


def test_the_policies_of_the_command_line_are_known() -> None:
    assert set(POLICIES) >= {"lru", "lru+offload", "lru+offload-wb", "elapsed", "mori", "infinite"}
    assert len(ADMISSIONS) == len(MADE)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("admission", MADE)
def test_every_policy_combines_with_every_admission(name: str, admission: str) -> None:
    made = build(name, admission)
    assert isinstance(made, POLICIES[name].scheduler)
    assert made.admission.name == admission


def test_each_scheduler_has_an_admission_of_its_own() -> None:
    factory = admission_factory("concur")
    assert factory() is not factory()


def test_names_mean_what_they_say() -> None:
    assert POLICIES["lru"].scheduler is Lru
    assert POLICIES["mori"].scheduler is Mori
    assert POLICIES["elapsed"].scheduler is Elapsed
    assert not POLICIES["lru"].offload
    assert POLICIES["lru+offload"].write_through
    assert POLICIES["lru+offload-wb"].offload
    assert not POLICIES["lru+offload-wb"].write_through
    assert POLICIES["infinite"].unbounded
    assert [name for name, spec in POLICIES.items() if spec.labels] == ["elapsed", "mori"]


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("mroi", "mori"), ("LRU", "lru"), ("elapse", "elapsed")]
)
def test_an_unknown_policy_names_the_nearest_and_all_others(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as refusal:
        policy(wrong)
    message = str(refusal.value)
    assert repr(wrong) in message
    assert f"did you mean {nearest!r}" in message
    assert all(name in message for name in POLICIES)
    assert "\n" not in message


@pytest.mark.parametrize("wrong", ["conkur", "", "none:3", "concur:5", "fixed-3"])
def test_an_unknown_admission_lists_the_known_ones(wrong: str) -> None:
    with pytest.raises(UnknownNameError) as refusal:
        admission_factory(wrong)
    assert all(name in str(refusal.value) for name in ADMISSIONS)


@pytest.mark.parametrize(
    "text",
    [
        "fixed",
        "fixed:",
        "fixed:0",
        "fixed:-1",
        "fixed:2.5",
        "fixed:many",
        "request-cap:0",
        "request-cap",
    ],
)
def test_a_bad_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r":32") as refusal:
        admission_factory(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mori", ("mori", None)),
        ("mori+concur", ("mori", "concur")),
        ("mori+concur+", ("mori", "concur+")),
        ("lru+offload", ("lru+offload", None)),
        ("lru+offload-wb+concur", ("lru+offload-wb", "concur")),
        ("lru+offload+concur+", ("lru+offload", "concur+")),
    ],
)
def test_a_policy_may_carry_its_admission(text: str, parts: tuple[str, str | None]) -> None:
    assert split_policy(text) == parts


def test_concur_and_concur_plus_differ_in_growth_on_hits_alone() -> None:
    settings = ConcurSettings(initial_window=7.0, grow_on_hits=True)
    plain, plus = (admission_factory(name, settings)() for name in ("concur", "concur+"))
    assert isinstance(plain, Concur)
    assert (plain.name, plus.name) == ("concur", "concur+")
    assert plain.program_window("w") == plus.program_window("w") == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_k": 0},
        {"hbm_headroom": 1.0},
        {"hbm_headroom": -0.1},
        {"tick_s": 0.0},
        {"swap_margin": -0.1},
        {"max_hold_s": -1.0},
        {"min_kept_share": 1.5},
    ],
    ids=str,
)
def test_scheduler_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(KvtierError, match=next(iter(wrong))):
        SchedulerSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"beta": 1.0},
        {"beta": 0.0},
        {"u_low": 0.6},
        {"u_high": 1.1},
        {"min_window": 0.0},
        {"initial_window": 0.0},
        {"interval_s": -1.0},
    ],
    ids=str,
)
def test_concur_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(KvtierError, match=next(iter(wrong))):
        ConcurSettings(**wrong)  # type: ignore[arg-type]


def test_a_ring_without_cycles_is_refused() -> None:
    with pytest.raises(KvtierError, match="at least 1"):
        IdlenessRing(0)
