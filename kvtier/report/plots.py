"""The two plots of a replay, PNG and SVG, in bytes that depend on the runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.files import write_atomically
from kvtier.report.figures import Group
from kvtier.report.plot_overview import draw_overview
from kvtier.report.plot_series import draw_places, draw_windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvtier",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_DPI = 150


def write_plots(
    folder: Path, groups: Sequence[Group], subject: str, *, batch: bool
) -> tuple[Path, ...]:
    """Write `overview` and `places` (`window` in batch mode) as PNG and SVG; returns the paths.

    `subject` names trace, model and load under the titles. Series are those of each group's first
    run. A character that the font lacks is drawn as a question mark. Raises OSError when the folder
    cannot be written.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        subject = _drawable(subject)
        figures = {
            "overview": draw_overview(groups, subject, batch=batch),
            "window" if batch else "places": (draw_windows if batch else draw_places)(
                groups, subject
            ),
        }
        return tuple(
            path for name, figure in figures.items() for path in _save(folder, name, figure)
        )


def _save(folder: Path, name: str, figure: Figure) -> list[Path]:
    paths = []
    # Without dates and versions, equal runs give equal bytes.
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = folder / f"{name}.{kind}"
        write_atomically(
            path,
            lambda file, kind=kind, metadata=metadata: figure.savefig(  # type: ignore[misc]
                file, format=kind, metadata=metadata, dpi=_DPI
            ),
        )
        paths.append(path)
    return paths


def _drawable(text: str) -> str:
    """`text` in the characters of the font that draws it."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in known and c.isprintable() else "?" for c in text)
