"""The report in the terminal: header, two tables that fit 100 columns, and the verdict."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.report.figures import Group, Spread
from kvtier.report.verdict import verdict

_PIPED_WIDTH_COLUMNS = 100
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    field: str
    show: Callable[[float], str]
    batch_only: bool = False


def number(value: float) -> str:
    """Three significant digits at least, thousands separated."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.0f} %"


def scaled(value: float) -> str:
    """Three significant digits with an SI prefix: 1.23M."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return number(value / factor) + prefix
    return number(value)


_OUTCOME = (
    _Column("output\ntok/s", "output_tok_per_s", number),
    _Column("steps\n/min", "steps_per_min", number),
    _Column("makespan\ns", "makespan_s", number, batch_only=True),
    _Column("TTFT\np50 s", "ttft_p50_s", number),
    _Column("TTFT\np90 s", "ttft_p90_s", number),
    _Column("TTFT\np99 s", "ttft_p99_s", number),
    _Column("GPU\nbusy", "gpu_busy_share", percent),
)
_CAUSES = (
    _Column("hits in\nHBM", "hit_rate_hbm", percent),
    _Column("hits in\nDRAM", "hit_rate_dram", percent),
    _Column("recomputed\ntokens", "recomputed_tokens", scaled),
    _Column("to DRAM\nbytes", "d2h_bytes", scaled),
    _Column("to HBM\nbytes", "h2d_bytes", scaled),
    _Column("moves/\nprogram", "moves_per_program", number),
    _Column("switches\n", "switches", number),
)


def print_report(header: Sequence[str], groups: Sequence[Group], *, batch: bool) -> None:
    """Print header, tables and verdict to stdout, at the terminal's width or 100 columns."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH_COLUMNS
    console = Console(width=width, highlight=False)
    for line in header:
        console.print(Text(line))
    for columns in (_OUTCOME, _CAUSES):
        console.print()
        console.print(_table(columns, groups, batch=batch))
    console.print()
    console.print(Text(verdict(groups, batch=batch), style="bold"))


def _table(columns: Sequence[_Column], groups: Sequence[Group], *, batch: bool) -> Table:
    shown = [column for column in columns if batch or not column.batch_only]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("policy\n", overflow="fold")
    table.add_column("admission\n", overflow="fold")
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    for group in groups:
        cells = [_cell(group, column) for column in shown]
        style = "dim" if group.is_bound else ""
        table.add_row(Text(_name(group)), Text(group.admission), *cells, style=style)
    return table


def _name(group: Group) -> str:
    marks = [
        mark for mark, holds in (("bound", group.is_bound), ("partial", group.partial)) if holds
    ]
    return f"{group.policy}\n({', '.join(marks)})" if marks else group.policy


def _cell(group: Group, column: _Column) -> Text:
    spread = group.spread(column.field)
    if spread is None:
        return Text(_ABSENT)
    text = Text(column.show(spread.mean))
    if len(group.runs) > 1:
        text.append(f"\n{_range(spread, column.show)}", style="dim")
    return text


def _range(spread: Spread, show: Callable[[float], str]) -> str:
    """Lowest-highest, the unit once; empty where both read the same."""
    low, high = show(spread.low), show(spread.high)
    if low == high:
        return ""
    unit = re.search(r"[^\d.]*$", high)
    assert unit is not None
    return f"{low.removesuffix(unit[0])}-{high}"
