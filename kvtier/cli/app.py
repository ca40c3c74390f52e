"""The command tree, and the one place where errors become a line and an exit code."""

import errno
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kvtier import __version__
from kvtier.cli import config_commands, trace_commands
from kvtier.cli.output import EXIT_BROKEN_PIPE, note, print_text
from kvtier.cli.replay import replay
from kvtier.errors import KvtierError

_EXIT_ERROR = 2
# What a full or closed device answers; such an error without a file is one of a stream's.
_STREAM_FAULTS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)

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
        print_text(f"kvtier {__version__}\n")
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

    0 on success, 2 after a wrong argument, a KvtierError or a failing stream, 130 after an
    interrupt (typer's), 141 when the reader of stdout has gone.
    """
    try:
        code = app(args=list(arguments), prog_name="kvtier", standalone_mode=False)
    except KvtierError as error:
        return _fail(str(error))
    except TyperException as error:
        return _fail(f"{error.format_message()} (see {_command_path(error)} --help)")
    except OSError as error:
        # One without a file is no wrong argument but a fault to be seen whole.
        if error.filename is None and error.errno not in _STREAM_FAULTS:
            raise
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}")
    except SystemExit:
        # So typer and rich end their help when its reader has gone.
        return EXIT_BROKEN_PIPE
    return code if isinstance(code, int) else 0


def _command_path(error: TyperException) -> str:
    """The command that the wrong arguments were given to."""
    context = getattr(error, "ctx", None)
    return "kvtier" if context is None else str(context.command_path)


def _fail(message: str) -> int:
    note(f"error: {' '.join(message.split())}")
    return _EXIT_ERROR
