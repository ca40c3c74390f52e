"""Ctrl-C: at once while nothing can be lost, deferred while results are made and written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class Interrupt:
    """Whether a SIGINT has come."""

    requested: bool = False


def leave_on_interrupt() -> None:
    """Let SIGINT end the process with 130 at once, imports under way or not."""
    signal.signal(signal.SIGINT, lambda signum, frame: os._exit(EXIT_INTERRUPTED))


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """The first SIGINT is noted, a second one raises KeyboardInterrupt at once."""
    interrupt = Interrupt()

    def note(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def raised_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, so that what is half done is tidied away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
