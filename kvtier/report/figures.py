"""Runs of one policy and admission taken together: means and ranges over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.scheduling import policy

Record = Mapping[str, Any]
"""One run's record, as `simulate` returns it (docs/replay.md)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds, in the figure's unit."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one policy and admission that count, one per seed.

    Complete runs alone, unless all are partial: rates of a run cut short are not comparable.
    """

    policy: str
    admission: str
    runs: tuple[Record, ...]

    @property
    def label(self) -> str:
        """The policy, and the admission where there is one."""
        return self.policy if self.admission == "none" else f"{self.policy}+{self.admission}"

    @property
    def is_bound(self) -> bool:
        """Whether this is the bound that no policy beats."""
        return policy(self.policy).unbounded

    @property
    def partial(self) -> bool:
        """Whether no run of the group came to its end."""
        return any(run["partial"] for run in self.runs)

    def spread(self, field: str) -> Spread | None:
        """Mean and range of a field; None when a run does not have it."""
        values = [run[field] for run in self.runs]
        if any(value is None for value in values):
            return None
        return Spread(sum(values) / len(values), min(values), max(values))


def group_runs(runs: Sequence[Record]) -> list[Group]:
    """Groups in the order in which their first runs appear, the bound last."""
    members: dict[tuple[str, str], list[Record]] = {}
    for run in runs:
        members.setdefault((run["policy"], run["admission"]), []).append(run)
    groups = []
    for (policy_name, admission), all_runs in members.items():
        complete = [run for run in all_runs if not run["partial"]]
        groups.append(Group(policy_name, admission, tuple(complete or all_runs)))
    return sorted(groups, key=lambda group: group.is_bound)
