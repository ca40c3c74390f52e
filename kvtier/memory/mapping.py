"""Host memory of an exact size, on huge pages, near a device."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.errors import CapacityError, PoolError
from kvtier.kernels.crew import Crew
from kvtier.memory.numa import ANYWHERE, Placement, list_text
from kvtier.memory.sizes import at_least

_LOG = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 64 << 20  # what a thread touches at a time: some 20 ms
_CLOSED = "this mapping is closed; make another one"
_MAX_THREADS = 16  # clearing pages is bound by memory, which fewer threads fill


class Mapping:
    """`num_bytes` of private anonymous memory, zeros at first.

    From 2 MiB on, it begins at a border of huge pages and asks for them; no byte beyond `num_bytes`
    is ever resident, save the rest of the last 4 KiB. Views of `memory` keep it alive: it is given
    back when `close` was called and the last of them is gone.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises CapacityError when the system refuses the address space."""
        if num_bytes < 1:
            raise PoolError(f"num_bytes={num_bytes}; a mapping has 1 or more")
        self.num_bytes = num_bytes
        begin, mapped = _aligned_map(num_bytes)
        _ask_for_huge_pages(mapped, begin, num_bytes)
        self._map: mmap.mmap | None = mapped
        self._memory: Bytes | None = np.frombuffer(mapped, np.uint8)[begin:]

    @property
    def memory(self) -> Bytes:
        """uint8[num_bytes]. Raises PoolError once closed."""
        if self._memory is None:
            raise PoolError(_CLOSED)
        return self._memory

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def touch(self, near: Placement = ANYWHERE, num_threads: int | None = None) -> None:
        """Make every page resident, by threads on the CPUs of `near`, so that it lies there.

        `num_threads` is one per CPU, up to 16, if not given; the caller is one of them. It ends
        with the caller's own CPUs as they were, on an interrupt, too. Call it before others write:
        it clears the first byte of every 4 KiB.
        """
        cpus = near.cpus or os.sched_getaffinity(0)
        threads = num_threads or min(len(cpus), _MAX_THREADS)
        pieces = range(0, self.num_bytes, _PIECE_BYTES)
        memory = self.memory
        parts = [partial(_touch, memory[at : at + _PIECE_BYTES], near) for at in pieces]
        crew = Crew(threads - 1)
        try:
            crew.run(parts, threads - 1)
        finally:
            crew.close()

    def keep_from_children(self) -> None:
        """Leave it out of forked children, which must not read it then.

        Pinned memory would be copied by the fork, page by page.
        """
        if self._map is None:
            raise PoolError(_CLOSED)
        self._map.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Let go of the memory. Twice is fine."""
        self._memory = self._map = None


def _aligned_map(num_bytes: int) -> tuple[int, mmap.mmap]:
    """A mapping that ends with its byte `begin` + num_bytes, and `begin`, a border of huge pages.

    What lies before is address space, never memory.
    """
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    try:
        mapped = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the system refuses {at_least(num_bytes)} of address space ({error}); ask for less, "
            "or raise ulimit -v and vm.overcommit_memory's limits"
        ) from error
    if not slack:
        return 0, mapped
    begin = -np.frombuffer(mapped, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    # Nothing behind the end: a huge page there would be resident beyond the size.
    mapped.resize(begin + num_bytes)
    return begin, mapped


def _ask_for_huge_pages(mapped: mmap.mmap, begin: int, num_bytes: int) -> None:
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    if not whole:
        return
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    except OSError as error:
        _LOG.warning("event=host_pool_without_huge_pages reason=%r", str(error))


def _touch(piece: Bytes, near: Placement) -> None:
    with _bound_to(near):
        piece[:: mmap.PAGESIZE] = 0  # numpy lets other threads run meanwhile


@contextmanager
def _bound_to(near: Placement) -> Iterator[None]:
    """The calling thread on the CPUs of `near` for as long."""
    if not near.cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, near.cpus)
    except OSError as error:
        raise PoolError(
            f"no thread may run on CPUs {list_text(near.cpus)} of node {near.node_id} ({error}); "
            "read the topology again"
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
