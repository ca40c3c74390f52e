"""What the commands print: tables for people, JSON for programs, notes on stderr."""

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import typer

EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell reports a program whose reader has gone."""

_PIPED_WIDTH_COLUMNS = 100


def is_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout is not None and sys.stdout.isatty()


def width_columns() -> int:
    """Columns to print in: COLUMNS where it is set, else the terminal's, else 100."""
    named = os.environ.get("COLUMNS", "")
    if named.isascii() and named.isdigit() and int(named) > 0:
        return int(named)
    if not is_terminal():
        return _PIPED_WIDTH_COLUMNS
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _PIPED_WIDTH_COLUMNS
    except OSError:
        return _PIPED_WIDTH_COLUMNS


def print_text(text: str) -> None:
    """Write `text` to stdout and flush it.

    Ends the command quietly when the reader has gone; raises OSError that names standard output
    when it cannot be written.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise typer.Exit(EXIT_BROKEN_PIPE) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def note(text: str) -> None:
    """Write a line to stderr; where that fails there is nowhere left to say so."""
    if sys.stderr is None:
        return
    with suppress(OSError):
        sys.stderr.write(f"{plain(text)}\n")
        sys.stderr.flush()


def plain(text: str) -> str:
    """`text` with every character that does not print as its escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout; the first column is kept whole, words too long for others fold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(plain(title)), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    console = Console(width=width_columns(), force_terminal=is_terminal())
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    print_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def print_json(value: object) -> None:
    """Print `value` to stdout as indented JSON."""
    import json

    print_text(json.dumps(value, indent=2) + "\n")
