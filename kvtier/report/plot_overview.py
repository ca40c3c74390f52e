"""The first plot: what each policy gives, with its range over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.report.colours import BLUE, INK, ORANGE, SKY, VERMILION
from kvtier.report.figures import Group, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_INCHES = 0.42
_TTFT = (("ttft_p50_s", "p50", BLUE, "o"), ("ttft_p90_s", "p90", VERMILION, "s"))


def draw_overview(groups: Sequence[Group], subject: str, *, batch: bool) -> Figure:
    """Output and TTFT by policy, in batch mode the makespan before them.

    The bound is a line; where nothing else ran it is a row.
    """
    from matplotlib.figure import Figure

    bars = [("output_tok_per_s", "Output, tok/s", SKY)]
    if batch:
        bars.insert(0, ("makespan_s", "Makespan, s (lower is better)", ORANGE))
    policies = [group for group in groups if not group.is_bound]
    rows = policies or list(groups)
    whole = (group for group in groups if group.is_bound and not group.partial)
    bound = next(whole, None) if policies else None
    height = 1.9 + _ROW_INCHES * max(len(rows), 3)
    figure = Figure(figsize=(3.2 + 3.3 * (len(bars) + 1), height), layout="constrained")
    figure.suptitle(f"Simulated: {_title(batch)}\n{subject}", fontsize=10, parse_math=False)
    axes = figure.subplots(1, len(bars) + 1, sharey=True, squeeze=False)[0]
    for panel, (field, title, colour) in zip(axes, bars, strict=False):
        _draw_bars(panel, rows, field, colour)
        _draw_bound(panel, bound, field)
        panel.set_title(title)
    _draw_ttft(axes[-1], rows, bound)
    axes[0].set_yticks(range(len(rows)), [_label(group) for group in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _title(batch: bool) -> str:
    return "makespan, output and TTFT by policy" if batch else "output and TTFT by policy"


def _label(group: Group) -> str:
    return f"{group.label} (partial)" if group.partial else group.label


def _draw_bars(panel: Axes, rows: Sequence[Group], field: str, colour: str) -> None:
    top = 0.0
    for index, group in enumerate(rows):
        spread = group.spread(field)
        if spread is None:
            continue
        panel.barh(index, spread.mean, height=0.62, color=colour)
        if len(group.runs) > 1:
            panel.errorbar(spread.mean, index, xerr=_bars(spread), color=INK, capsize=3, lw=1.2)
        # Inside the bar, where neither range nor bound crosses it.
        panel.annotate(
            f"{spread.mean:,.0f}", (0, index), (5, 0), textcoords="offset points", va="center"
        )
        top = max(top, spread.high)
    panel.set_xlim(0.0, 1.08 * top if top else 1.0)
    panel.grid(axis="x", alpha=0.3, lw=0.6)
    panel.set_axisbelow(True)


def _bars(spread: Spread) -> list[list[float]]:
    return [[spread.mean - spread.low], [spread.high - spread.mean]]


def _draw_bound(panel: Axes, bound: Group | None, field: str) -> None:
    spread = bound.spread(field) if bound is not None else None
    if spread is None:
        return
    panel.axvline(spread.mean, color=INK, ls="--", lw=1.2)
    panel.set_xlim(0.0, max(panel.get_xlim()[1], 1.08 * spread.mean))
    panel.set_xlabel(f"dashed: bound, infinite HBM ({spread.mean:,.0f})")


def _draw_ttft(panel: Axes, rows: Sequence[Group], bound: Group | None) -> None:
    for field, name, colour, marker in _TTFT:
        for index, group in enumerate(rows):
            spread = group.spread(field)
            if spread is None:
                continue
            panel.errorbar(
                spread.mean, index, xerr=_bars(spread), fmt=marker, color=colour, capsize=3
            )
        panel.plot([], [], marker, color=colour, label=name)
        limit = bound.spread(field) if bound is not None else None
        if limit is not None:
            panel.axvline(limit.mean, color=colour, ls="--", lw=1.0, label=f"{name}, infinite HBM")
    if any(group.spread(field) is not None for field, *_ in _TTFT for group in rows):
        panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_title("TTFT, s (log scale, lower is better)")
    panel.grid(axis="x", alpha=0.3, lw=0.6)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, fontsize=8)
