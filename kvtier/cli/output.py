"""What the commands print: tables for people, JSON for programs."""

import sys
from collections.abc import Iterable, Sequence

_PIPED_WIDTH_COLUMNS = 200


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout, as wide as the terminal, or fixed when the output is piped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _PIPED_WIDTH_COLUMNS
    Console(width=width).print(table)


def print_json(value: object) -> None:
    """Print `value` to stdout as indented JSON."""
    import json

    print(json.dumps(value, indent=2))
