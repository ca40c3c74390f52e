"""The scheduling core: who sits where (policies) and how many run (admissions). Sans-IO."""

from kvtier.scheduling.admission import Admission, Concur, FixedWindow, NoAdmission, RequestCap
from kvtier.scheduling.idleness import IdlenessRing
from kvtier.scheduling.lru import Lru
from kvtier.scheduling.mori import Elapsed, Mori
from kvtier.scheduling.registry import (
    ADMISSIONS,
    POLICIES,
    PolicySpec,
    admission_factory,
    build,
    policy,
    split_policy,
)
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.settings import ConcurSettings, SchedulerSettings

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "Admission",
    "Concur",
    "ConcurSettings",
    "Elapsed",
    "FixedWindow",
    "IdlenessRing",
    "Lru",
    "Mori",
    "NoAdmission",
    "PolicySpec",
    "RequestCap",
    "Scheduler",
    "SchedulerSettings",
    "admission_factory",
    "build",
    "policy",
    "split_policy",
]
