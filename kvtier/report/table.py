"""The report as text: header, tables that fit the width, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.report.figures import Group, Spread
from kvtier.report.numbers import number, percent, scaled
from kvtier.report.verdict import verdict

_LEAST_WIDTH_COLUMNS = 60
_NO_LIMIT_COLUMNS = 10_000
_BETWEEN_COLUMNS = 2
_POLICY = "policy\n"
_ADMISSION = "admission\n"
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    field: str
    show: Callable[[float], str]
    batch_only: bool = False


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


def render_report(
    header: Sequence[str], groups: Sequence[Group], *, batch: bool, width: int, styled: bool
) -> str:
    """Header, tables and verdict for `width` columns, 60 at least; `styled` keeps bold and dim.

    Figures that do not fit beside the names go to a further table with the same names.
    """
    width = max(width, _LEAST_WIDTH_COLUMNS)
    console = Console(
        # Tables are cut to size here and never by the console.
        width=_NO_LIMIT_COLUMNS,
        file=StringIO(),
        highlight=False,
        force_terminal=styled,
        color_system="standard" if styled else None,
    )
    with console.capture() as capture:
        for line in header:
            _print_wrapped(console, Text(line), width)
        for topic in (_OUTCOME, _CAUSES):
            shown = [column for column in topic if batch or not column.batch_only]
            for columns in _split(shown, groups, width):
                console.print()
                console.print(_table(columns, groups))
        console.print()
        _print_wrapped(console, Text(verdict(groups, batch=batch), style="bold"), width)
    text = capture.get()
    return text if styled else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _print_wrapped(console: Console, text: Text, width: int) -> None:
    for line in text.wrap(console, width):
        line.rstrip()
        console.print(line)


def _split(
    columns: Sequence[_Column], groups: Sequence[Group], width: int
) -> Iterator[list[_Column]]:
    """The columns, table by table: as many as fit beside the names, one at least."""
    names_width = _width([_POLICY, *map(_name, groups)])
    names_width += _width([_ADMISSION, *(group.admission for group in groups)])
    table: list[_Column] = []
    used = names_width
    for column in columns:
        needed = _width([column.title, *(_cell(group, column).plain for group in groups)])
        if table and used + needed - _BETWEEN_COLUMNS > width:
            yield table
            table, used = [], names_width
        table.append(column)
        used += needed
    yield table


def _width(texts: Sequence[str]) -> int:
    """Columns that the cells take, with the space after them."""
    return max(cell_len(line) for text in texts for line in text.split("\n")) + _BETWEEN_COLUMNS


def _table(columns: Sequence[_Column], groups: Sequence[Group]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(_POLICY, no_wrap=True)
    table.add_column(_ADMISSION, no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for group in groups:
        cells = [_cell(group, column) for column in columns]
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
