"""The comparison in one sentence, computed from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.report.figures import Group, Spread
from kvtier.report.numbers import number

_CLOSE = 0.05
_LONG_TAIL = 2.0
_TAIL = "ttft_p99_s"


@dataclass(frozen=True, slots=True)
class _Entry:
    label: str
    spread: Spread


@dataclass(frozen=True, slots=True)
class _Measure:
    """What policies are compared by."""

    field: str
    unit: str
    best: str
    lower_is_better: bool

    def lead(self, first: float, second: float) -> float:
        """By which share `first` is ahead of `second`."""
        return second / first - 1.0 if self.lower_is_better else first / second - 1.0


_OUTPUT = _Measure("output_tok_per_s", "tok/s", "the most output", lower_is_better=False)
_MAKESPAN = _Measure("makespan_s", "s", "the shortest makespan", lower_is_better=True)


def verdict(groups: Sequence[Group], *, batch: bool) -> str:
    """Who is ahead, of whom and by how much; policies within 5 % of the best count as equal.

    Compares output tok/s, in batch mode the makespan. The bound is named as such, partial runs are
    left out. A best policy, or `mori`, whose p99 TTFT is more than twice that of another policy is
    told of with the requests that got no answer.
    """
    measure = _MAKESPAN if batch else _OUTPUT
    complete = [group for group in groups if not group.partial]
    entries = [entry for g in complete if not g.is_bound and (entry := _entry(g, measure))]
    if not entries:
        return _without_policies(groups, complete, measure)
    entries.sort(key=lambda e: e.spread.mean, reverse=not measure.lower_is_better)
    bound = next((e for g in complete if g.is_bound and (e := _entry(g, measure))), None)
    text = _compare(entries, measure) + _against_bound(entries[0], bound, measure)
    return text + _tails([group for group in complete if not group.is_bound], entries[0].label)


def _without_policies(groups: Sequence[Group], complete: Sequence[Group], measure: _Measure) -> str:
    if not all(group.is_bound for group in groups) or not complete:
        return "No policy ran to its end, so there is nothing to compare."
    entry = _entry(complete[0], measure)
    figure = f" ({entry.spread.mean:,.0f} {measure.unit})" if entry is not None else ""
    return f"Only the bound ran, infinite HBM{figure}: name policies to compare with --policy."


def _tails(groups: Sequence[Group], best: str) -> str:
    """A sentence on the long tails of the best policy and of mori; empty without one."""
    tails = {group.label: spread.mean for group in groups if (spread := group.spread(_TAIL))}
    if not tails:
        return ""
    shortest = min(tails, key=tails.__getitem__)
    watched = [group for group in groups if group.label == best or group.policy == "mori"]
    named = [
        group
        for group in watched
        if group.label in tails and tails[group.label] > _LONG_TAIL * tails[shortest]
    ]
    if not named:
        return ""
    long = ", ".join(f"{group.label} {number(tails[group.label])} s" for group in named)
    compared = [*named, next(group for group in groups if group.label == shortest)]
    unanswered = ", ".join(f"{group.label} {_unanswered(group):,}" for group in compared)
    return (
        f" The price is the tail: p99 TTFT is {long}, against {number(tails[shortest])} s of "
        f"{shortest}; requests without an answer at the end: {unanswered}."
    )


def _unanswered(group: Group) -> int:
    """Over all seeds."""
    return sum(run["num_unanswered"] for run in group.runs)


def _entry(group: Group, measure: _Measure) -> _Entry | None:
    spread = group.spread(measure.field)
    return _Entry(group.label, spread) if spread is not None and spread.mean > 0 else None


def _compare(entries: list[_Entry], measure: _Measure) -> str:
    best = entries[0]
    figure = f"{best.spread.mean:,.0f} {measure.unit}"
    if len(entries) == 1:
        return f"{best.label}: {figure}."
    leads = [measure.lead(best.spread.mean, entry.spread.mean) for entry in entries]
    close = [e.label for e, lead in zip(entries, leads, strict=True) if lead <= _CLOSE]
    if len(close) == len(entries):
        return f"All are within 5 % of {best.label} ({figure})."
    second, last = entries[len(close)], entries[-1]
    text = f"{best.label} has {measure.best}: {figure}"
    if len(close) > 1:
        text += f" ({', '.join(close[1:])} within 5 %)"
    text += f", {_ahead(best, second, measure)}"
    if last is not second:
        text += f" and {_ahead(best, last, measure)}"
    return text + _overlap(best, second, measure) + "."


def _ahead(best: _Entry, other: _Entry, measure: _Measure) -> str:
    lead = measure.lead(best.spread.mean, other.spread.mean)
    return f"{lead:.0%} ahead of {other.label} ({other.spread.mean:,.0f})".replace("%", " %")


def _overlap(best: _Entry, second: _Entry, measure: _Measure) -> str:
    if measure.lower_is_better:
        apart = best.spread.high < second.spread.low
    else:
        apart = best.spread.low > second.spread.high
    return "" if apart else f"; its range over seeds overlaps that of {second.label}"


def _against_bound(best: _Entry, bound: _Entry | None, measure: _Measure) -> str:
    if bound is None:
        return ""
    figure = f"{bound.spread.mean:,.0f}"
    share = best.spread.mean / bound.spread.mean
    if measure.lower_is_better:
        share = 1.0 / share
    if share > 1.0 + _CLOSE:
        return f" Infinite HBM without admission is no bound here: {figure} {measure.unit}."
    return f" {best.label} reaches {100 * share:.0f} % of the bound, infinite HBM ({figure})."
