"""Copies of pages in host memory: numpy and torch calls that drop the GIL, on a few threads.

Neighbouring segments with the same rows form a slab, and each slab is copied in one of the ways of
`CpuMethod`. Which is best depends on row bytes, on where the segments lie and on the ids: see
`choose`. Its figures come from perf.cpu_copy; see docs/cpu-copy.md.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.errors import CopyError
from kvtier.kernels.arguments import at_least_one, one_of
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.cpu_rows import (
    GATHER,
    SCATTER,
    Bytes,
    CpuMethod,
    Index,
    Moves,
    Slab,
    even_groups,
    flat_refusal,
    slabs_of,
)
from kvtier.kernels.crew import Crew, Part
from kvtier.kernels.ids import Ids
from kvtier.kernels.naive import page_checksums
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor

_LONG_BYTES = 64 << 10  # copying this takes so long that a Python call for it does not show
_ALONE_BYTES = 1 << 20  # below this, waking a thread costs more than it saves
_PART_BYTES = 8 << 20  # what a thread takes at a time
_PIECE_BYTES = 64 << 10  # columns and
_PIECE_PAGES_BYTES = 256 << 10  # size of what is summed at once: checksums stay within the cache


class CpuCopy(CopyBackend):
    """Gather and scatter on host tensors. One object serves any number of threads at a time.

    `num_threads` counts the caller: a copy runs on it and on `num_threads - 1` own threads, which
    `close` ends. A copy that is under way elsewhere when it is closed is completed. When a copy
    returns or raises, KeyboardInterrupt included, none of its bytes moves any more; after an
    interrupt, `packed` or the named pages hold some old and some new bytes. A forked child may go
    on with the object, and gets threads of its own.
    `method` forces one way for all copies, by CpuMethod or its value; a copy that it cannot do
    raises CopyError. Raises ConfigError for another method and for less than one thread.
    """

    name = "cpu"

    def __init__(self, num_threads: int = 2, method: CpuMethod | str | None = None) -> None:
        self.num_threads = at_least_one("num_threads", num_threads)
        self.method = one_of("method", CpuMethod, method)
        self._crew = Crew(self.num_threads - 1)

    def close(self) -> None:
        """End the threads once their copies are done; a later copy raises CopyError."""
        super().close()
        self._crew.close()

    def _check(self, pool: PagedPool) -> None:
        if pool.device.type != "cpu":
            raise CopyError(f"the pool is on {pool.device}; CpuCopy copies host memory only")

    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        moves = SCATTER if scatter else GATHER
        pages: Bytes = packed.numpy()
        num_threads = self.num_threads if ids.size * sum(pool.row_bytes) >= _ALONE_BYTES else 1
        wide = ids.astype(np.int64)
        self._run(_copy_parts(moves, self.method, pool, wide, pages, num_threads), num_threads)
        if checksums is not None:
            parts = _checksum_parts(pool, pages, checksums.numpy(), num_threads)
            self._run(parts, num_threads)

    def _run(self, parts: list[Part], num_threads: int) -> None:
        self._crew.run(parts, min(num_threads, len(parts)) - 1)


def choose(slab: Slab, ids: Index, packed: Bytes) -> CpuMethod:
    """The fastest way that can do this copy.

    RUNS where runs that are contiguous on both sides are long. Else FLAT where it can: it moves
    each row by memmove, which beats numpy's copy of long rows, too. Else RUNS where its calls are
    few or long, and SEGMENTS where they are not.
    """
    num_runs = ids.size - int(np.count_nonzero(np.diff(ids) == 1))
    contiguous = packed.shape[1] == slab.row_bytes == slab.stride_bytes
    run_bytes = slab.row_bytes * ids.size // num_runs if contiguous and num_runs < ids.size else 0
    if run_bytes >= _LONG_BYTES:
        return CpuMethod.RUNS
    if flat_refusal(slab, packed) is None:
        return CpuMethod.FLAT
    num_calls = num_runs * len(even_groups(slab))
    call_bytes = slab.num_bytes * ids.size // num_calls
    few = num_calls <= len(slab.bases)
    return CpuMethod.RUNS if few or call_bytes >= _LONG_BYTES else CpuMethod.SEGMENTS


def _copy_parts(
    moves: Moves,
    method: CpuMethod | None,
    pool: PagedPool,
    ids: Index,
    packed: Bytes,
    num_threads: int,
) -> list[Part]:
    """Parts that write different bytes; every check is made before the first one runs."""
    slabs = slabs_of(pool)
    if ids.size < num_threads and method != CpuMethod.FLAT:
        slabs = [part for slab in slabs for part in _split(slab, num_threads)]
    parts: list[Part] = []
    for slab in slabs:
        way = method or choose(slab, ids, packed)
        refusal = flat_refusal(slab, packed) if way == CpuMethod.FLAT else None
        if refusal is not None:
            raise CopyError(f"method flat cannot do this copy: {refusal}; use another one")
        # numpy keeps the GIL where it writes the rows of one segment: threads would only queue.
        alone = way == CpuMethod.SEGMENTS and moves is SCATTER
        num_parts = 1 if alone else _num_parts(ids.size * slab.num_bytes, num_threads)
        for first, end in _cuts(ids.size, num_parts):
            parts.append(partial(moves[way], slab, ids[first:end], packed[first:end]))
    return parts


def _split(slab: Slab, num_parts: int) -> list[Slab]:
    """The slab cut by segments, for copies of too few pages to cut by those."""
    return [slab.part(first, end) for first, end in _cuts(len(slab.bases), num_parts)]


def _num_parts(num_bytes: int, num_threads: int) -> int:
    return 1 if num_threads == 1 else max(num_threads, num_bytes // _PART_BYTES)


def _cuts(count: int, num_parts: int) -> list[tuple[int, int]]:
    """[0, count) in at most `num_parts` ranges of nearly the same length, none empty."""
    edges = [count * part // num_parts for part in range(num_parts + 1)]
    return [(first, end) for first, end in pairwise(edges) if first < end]


def _checksum_parts(
    pool: PagedPool, packed: Bytes, checksums: Index, num_threads: int
) -> list[Part]:
    begin = pool.offset_bytes[0]
    end = pool.offset_bytes[-1] + pool.row_bytes[-1]
    num_parts = _num_parts(packed.shape[0] * (end - begin), num_threads)
    return [
        partial(_sum_pages, packed[first:last, begin:end], begin, checksums[first:last])
        for first, last in _cuts(packed.shape[0], num_parts)
    ]


def _sum_pages(copied: Bytes, begin: int, checksums: Index) -> None:
    """checksums[i] = the sum over copied[i], which are the bytes of page i from `begin` on."""
    num_pages, num_bytes = copied.shape
    sums = checksums.view(np.uint64)
    sums[:] = 0
    lead = begin % 4
    edges = [0, *range(_PIECE_BYTES - lead, num_bytes, _PIECE_BYTES), num_bytes]
    step = max(1, _PIECE_PAGES_BYTES // min(num_bytes, _PIECE_BYTES))
    for at in range(0, num_pages, step):
        for first, end in pairwise(edges):
            sums[at : at + step] += _sum_piece(copied[at : at + step, first:end], begin + first)


def _sum_piece(piece: Bytes, position: int) -> npt.NDArray[np.uint64]:
    """The sums of bytes that begin at `position` of their page.

    A word's weight is its place in the page: its place in the piece plus the words before it.
    """
    before, lead = divmod(position, 4)
    padded = np.pad(piece, ((0, 0), (lead, -(lead + piece.shape[1]) % 4)))
    words: npt.NDArray[np.uint64] = padded.view("<u4").sum(axis=1, dtype=np.uint64)
    return page_checksums(padded).view(np.uint64) + words * np.uint64(before)
