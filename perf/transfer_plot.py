"""The plot of the transfer benchmark: goodput above, an urgent page's p99 below, scene by scene."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from kvtier.report.colours import BLUE, GREY, INK, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ARMS = (("aimd", "with the window", BLUE, "o-"), ("none", "without", VERMILION, "s--"))
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvtier",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def save_plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw all scenes of `records`; the kind of file follows from its name."""
    from matplotlib.figure import Figure

    scenes = [list(group) for _, group in groupby(records, key=lambda r: (r["mover"], r["scene"]))]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.1 * len(scenes) + 0.6, 5.2), layout="constrained")
        axes = figure.subplots(2, len(scenes), sharex=True, squeeze=False)
        for column, scene in enumerate(scenes):
            _draw(axes[0, column], axes[1, column], scene)
        axes[0, 0].set_ylabel("goodput, GB/s")
        axes[1, 0].set_ylabel("urgent page, p99, ms")
        axes[0, 0].legend(loc="lower right")
        axes[1, 0].legend(loc="upper left")
        metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
        figure.savefig(file, metadata=metadata, dpi=150)


def _draw(goodput: Axes, latency: Axes, scene: Sequence[dict[str, Any]]) -> None:
    idle, busy = scene[0], scene[1:]
    kind = "simulated" if idle["simulated"] else "measured"
    goodput.set_title(f"{idle['mover']}, {idle['scene']}\n({kind})", fontsize=9.5)
    for window, label, colour, style in _ARMS:
        rows = [record for record in busy if record["window"] == window]
        jobs = [record["num_jobs"] for record in rows]
        goodput.plot(jobs, [r["goodput_gb_per_s"] for r in rows], style, color=colour, label=label)
        latency.plot(jobs, [r["urgent_p99_us"] / 1e3 for r in rows], style, color=colour)
    best = max(record["goodput_gb_per_s"] for record in busy)
    goodput.axhline(0.9 * best, color=GREY, lw=1.0, label="90 % of the best")
    goodput.set_ylim(0.0, 1.15 * best)
    latency.axhline(idle["bound_us"] / 1e3, color=INK, lw=1.0, ls=":", label="idle p99 + one chunk")
    latency.axhline(idle["urgent_p99_us"] / 1e3, color=GREY, lw=1.0, label="idle p99")
    latency.set_xscale("log", base=2)
    latency.set_yscale("log")
    latency.set_xticks(jobs, [str(count) for count in jobs])
    latency.set_xlabel("concurrent jobs")
