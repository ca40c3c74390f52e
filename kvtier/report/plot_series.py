"""The second plot: one panel per policy, over simulated time; the same axes in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.report.colours import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILION
from kvtier.report.figures import Group, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = (3.4, 2.1)
_HEADER_INCHES = 1.2
_MOST_COLUMNS = 3
_PLACES = (("in_hbm", "in HBM", SKY), ("in_dram", "in DRAM", ORANGE), ("nowhere", "nowhere", GREY))
_SHARES = (("usage", "HBM locked by running requests", BLUE), ("hit_rate", "hit rate", VERMILION))


def draw_places(groups: Sequence[Group], subject: str) -> Figure:
    """Where most of each live program's KV is, stacked, and how many programs are held."""
    figure, panels = _panels(
        groups, f"Simulated: where programs sit over time{_of_seed(groups)}\n{subject}"
    )
    for panel, group in panels:
        series = group.runs[0]["series"]
        minutes = _minutes(group.runs[0])
        panel.stackplot(
            minutes,
            *(series[name] for name, _, _ in _PLACES),
            colors=[colour for _, _, colour in _PLACES],
            labels=[label for _, label, _ in _PLACES],
            lw=0,
        )
        panel.plot(minutes, series["held"], color=INK, lw=1.1, label="held in the gateway (line)")
        panel.set_ylim(bottom=0)
    _finish(figure, panels, "programs")
    return figure


def draw_windows(groups: Sequence[Group], subject: str) -> Figure:
    """Usage and hit rate (left axis), and the agent window (right axis)."""
    title = f"Simulated: HBM usage, hit rate and agent window{_of_seed(groups)}"
    figure, panels = _panels(groups, f"{title}\n{subject}")
    most = max((w for _, group in panels for w in _windows(group.runs[0])), default=0.0)
    for panel, group in panels:
        run = group.runs[0]
        minutes = _minutes(run)
        for name, label, colour in _SHARES:
            points = [(m, 100 * v) for m, v in zip(minutes, run["series"][name], strict=True)]
            known = [(m, v) for m, v in points if math.isfinite(v)]
            panel.plot(*zip(*known, strict=True), color=colour, lw=1.0, label=label)
        panel.set_ylim(0, 105)
        _draw_window(panel, run, most)
    _finish(figure, panels, "%")
    return figure


def _of_seed(groups: Sequence[Group]) -> str:
    """Which seed the curves are of, where there are several."""
    many = any(len(group.runs) > 1 for group in groups)
    return f" (curves of seed {groups[0].runs[0]['seed']})" if many else ""


def _draw_window(panel: Axes, run: Record, most: float) -> None:
    """The window on an axis of its own, the same in all panels; a note where there is none."""
    window = _windows(run)
    panel.plot([], [], color=GREEN, lw=1.6, label="agent window (right axis)")
    if not window:
        note = "no window"
        panel.annotate(note, (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=8)
        return
    right = panel.twinx()
    right.plot(_minutes(run), window, color=GREEN, lw=1.6)
    right.set_ylim(0, 1.05 * most)
    right.set_ylabel("programs", color=GREEN)
    right.tick_params(axis="y", colors=GREEN)
    right.spines["right"].set_visible(True)


def _windows(run: Record) -> list[float]:
    """The agent window over time, programs; empty where nothing bounds it."""
    window: list[float] = run["series"].get("window", [])
    return window if all(math.isfinite(w) for w in window) else []


def _minutes(run: Record) -> list[float]:
    return [t_s / 60.0 for t_s in run["series"]["t_s"]]


def _panels(groups: Sequence[Group], title: str) -> tuple[Figure, list[tuple[Axes, Group]]]:
    """A grid with a panel for each group that has a series; the bound has one where it is alone."""
    from matplotlib.figure import Figure

    drawn = [g for g in groups if g.runs[0]["series"]]
    shown = [g for g in drawn if not g.is_bound] or drawn
    columns = _num_columns(len(shown))
    rows = max(math.ceil(len(shown) / columns), 1)
    size = (max(_PANEL_INCHES[0] * columns, 6.0), _HEADER_INCHES + _PANEL_INCHES[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for unused in grid[len(shown) :]:
        unused.set_axis_off()
    panels = list(zip(grid, shown, strict=False))
    for panel, group in panels:
        panel.set_title(f"{group.label} (partial)" if group.partial else group.label)
        panel.tick_params(labelbottom=True)
        panel.set_xlim(0, max(_minutes(g.runs[0])[-1] for g in shown) or 1.0)
    return figure, panels


def _num_columns(num_panels: int) -> int:
    """Three, or two where that leaves no gap."""
    return 2 if num_panels == 4 else min(max(num_panels, 1), _MOST_COLUMNS)


def _finish(figure: Figure, panels: Sequence[tuple[Axes, Group]], unit: str) -> None:
    """Units on the outer panels, one legend for all."""
    columns = _num_columns(len(panels))
    for index, (panel, _) in enumerate(panels):
        if index % columns == 0:
            panel.set_ylabel(unit)
        if index + columns >= len(panels):
            panel.set_xlabel("simulated time, min")
    if panels:
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8.5)
