"""The console script: as little as can be before Ctrl-C and failing streams are seen to."""

import os
import sys

from kvtier.cli.interrupts import leave_on_interrupt


def main() -> None:
    """Run the command line of this process and exit with its code."""
    leave_on_interrupt()
    from kvtier.cli.app import run

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # A file's name may hold what the stream's encoding does not.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = run(sys.argv[1:])
    _silence_failing_streams()
    sys.exit(code)


def _silence_failing_streams() -> None:
    """Python flushes once more at its end and would complain of a stream that failed before."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
