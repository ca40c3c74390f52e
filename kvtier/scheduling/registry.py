"""Policies and admissions by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.scheduling.admission import Admission, Concur, FixedWindow, NoAdmission, RequestCap
from kvtier.scheduling.lru import Lru
from kvtier.scheduling.mori import Elapsed, Mori
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.settings import ConcurSettings, SchedulerSettings


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy as users name it: its scheduler, and what it needs of the engine's cache."""

    name: str
    scheduler: type[Scheduler]
    offload: bool
    """The engine keeps evicted KV in DRAM."""
    write_through: bool = False
    """KV is copied down when it is written (HiCache's default), not when it is evicted."""
    labels: bool = False
    """Eviction follows labels, and demotions are commanded."""
    unbounded: bool = False
    """HBM without end: the bound for placement. Admission may still beat it under overload."""


POLICIES: dict[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec("lru", Lru, offload=False),
        PolicySpec("lru+offload", Lru, offload=True, write_through=True),
        PolicySpec("lru+offload-wb", Lru, offload=True),
        PolicySpec("elapsed", Elapsed, offload=True, labels=True),
        PolicySpec("mori", Mori, offload=True, labels=True),
        PolicySpec("infinite", Lru, offload=False, unbounded=True),
    )
}
ADMISSIONS = ("none", "fixed:N", "request-cap:N", "concur", "concur+")


def policy(name: str) -> PolicySpec:
    """The policy of this name; UnknownNameError otherwise."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name]


def split_policy(text: str) -> tuple[str, str | None]:
    """`mori+concur` is policy mori with admission concur: (policy, admission or None)."""
    for admission in ("concur+", "concur"):
        if text.endswith("+" + admission):
            return text.removesuffix("+" + admission), admission
    return text, None


def admission_factory(text: str, concur: ConcurSettings | None = None) -> Callable[[], Admission]:
    """A maker of fresh admissions: none, fixed:N, request-cap:N, concur or concur+."""
    settings = concur if concur is not None else ConcurSettings()
    kind, _, number = text.partition(":")
    if kind in ("fixed", "request-cap"):
        if not number.isdigit() or int(number) < 1:
            raise ConfigError(f"admission {text!r} needs a count of at least 1, as in {kind}:32")
        window = FixedWindow if kind == "fixed" else RequestCap
        return lambda: window(int(number))
    if text == "none":
        return NoAdmission
    if text == "concur":
        return lambda: Concur(replace(settings, grow_on_hits=False))
    if text == "concur+":
        return lambda: Concur(replace(settings, grow_on_hits=True))
    raise UnknownNameError("admission", text, ADMISSIONS)


def build(
    policy_name: str,
    admission: str = "none",
    settings: SchedulerSettings | None = None,
    concur: ConcurSettings | None = None,
) -> Scheduler:
    """A fresh scheduler: one policy, one admission."""
    return policy(policy_name).scheduler(settings, admission_factory(admission, concur)())
