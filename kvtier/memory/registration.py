"""Host memory made known to a device, chunk by chunk, all of it or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtier.errors import PoolError
from kvtier.memory.sizes import at_least, at_most

_LOG = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 30
"""One call for 512 GiB or more always fails: the driver's table of its pages is too large."""
DEFAULT_CHUNK_BYTES = 4 << 30
"""A call takes some 0.1 s per GB and stalls the CUDA calls of other processes for as long."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are registered and those of all chunks, after each chunk."""


class Registrar(Protocol):
    """What makes memory known to a device."""

    def register(self, address: int, num_bytes: int) -> None:
        """Register a range. Raises, with nothing registered and no error pending, if it cannot."""

    def unregister(self, address: int) -> None:
        """Undo `register` of the range at `address`. Raises, with no error pending, likewise."""


def log_progress(done_bytes: int, total_bytes: int) -> None:
    """One line per chunk in the log, at level INFO."""
    _LOG.info("event=host_memory_registered done_bytes=%d total_bytes=%d", done_bytes, total_bytes)


@dataclass(frozen=True)
class Pinning:
    """How host memory is to be registered. Raises PoolError for chunks beyond MAX_CHUNK_BYTES."""

    registrar: Registrar
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Chunks are whole pages, as many as fit into this; one at least."""
    progress: Progress = log_progress

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise PoolError(f"chunk_bytes={self.chunk_bytes}; pass 1 to {MAX_CHUNK_BYTES}")


class Registration:
    """Registered pages [0, num_pages), in chunks of `chunk_pages`: no page is in two of them.

    A copy in one piece must stay within a chunk, too.
    """

    def __init__(self, address: int, num_pages: int, page_bytes: int, pinning: Pinning) -> None:
        """Register all pages from `address` on.

        Whatever ends it early, an interrupt too, first undoes what was done, latest chunk first.
        Raises PoolError that names the chunk where the registrar refuses.
        """
        self.chunk_pages = min(num_pages, max(1, pinning.chunk_bytes // page_bytes))
        self._registrar = pinning.registrar
        self._addresses: list[int] = []
        chunk_bytes, total = self.chunk_pages * page_bytes, num_pages * page_bytes
        try:
            for done in range(0, total, chunk_bytes):
                size = min(chunk_bytes, total - done)
                self._register(address + done, size, done, total)
                pinning.progress(done + size, total)
        except BaseException as error:
            for failure in self._undo():
                error.add_note(f"a chunk stays pinned until the process ends: {failure}")
            raise

    @property
    def num_chunks(self) -> int:
        """Chunks that are registered; 0 once closed."""
        return len(self._addresses)

    def close(self) -> None:
        """Unregister every chunk, latest first, whether or not one fails. Twice is fine.

        Raises PoolError that says how many failed, with the first reason.
        """
        num_chunks = self.num_chunks
        failures = self._undo()
        if failures:
            raise PoolError(
                f"{len(failures)} of {num_chunks} chunks of host memory stay pinned until the "
                f"process ends: {failures[0]}"
            ) from failures[0]

    def _register(self, address: int, size: int, done: int, total: int) -> None:
        try:
            self._registrar.register(address, size)
        except Exception as error:
            raise PoolError(
                f"registering {at_least(size)} of host memory failed after {at_most(done)} of "
                f"{at_least(total)} ({error}); what was registered is rolled back: ask for less, "
                "or free memory"
            ) from error
        self._addresses.append(address)

    def _undo(self) -> list[Exception]:
        failures: list[Exception] = []
        while self._addresses:
            try:
                self._registrar.unregister(self._addresses.pop())
            except Exception as error:
                failures.append(error)
        return failures
