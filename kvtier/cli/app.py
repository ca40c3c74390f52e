"""The command tree, and the one place where errors become a line and an exit code."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kvtier import __version__
from kvtier.cli import config_commands, trace_commands
from kvtier.cli.replay import replay
from kvtier.errors import KvtierError

_EXIT_ERROR = 2

app = typer.Typer(
    name="kvtier",
    help="KV-cache tiering for LLM agents: replay agent traces under placement and admission "
    "policies.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_commands.app, name="config")
app.add_typer(trace_commands.app, name="trace")
app.command()(replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments` (without the program's name); returns the exit code.

    0 on success, 2 after a wrong argument or a KvtierError, 130 after an interrupt (typer's).
    """
    try:
        code = app(args=list(arguments), prog_name="kvtier", standalone_mode=False)
    except KvtierError as error:
        return _fail(str(error))
    except TyperException as error:
        return _fail(f"{error.format_message()} (see kvtier --help)")
    except OSError as error:
        # One without a file is no wrong argument but a fault to be seen whole.
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}")
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def _fail(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return _EXIT_ERROR
