"""Runs the CUDA C of `CupyCopy` on the host: the lanes of a warp are fibers in turn.

The source is compiled as C++ with the few words of CUDA that it uses. A lane runs until it asks
for another's value, then the next one does; a warp is over when its lanes are. It shows that the
source computes the right addresses, bytes and sums, not how it runs on a device.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from kvtier.kernels.cuda_source import SOURCE, Variant, make_geometry
from kvtier.kernels.ids import Ids, PageIds, check_page_ids
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.tables import segment_rows

_BEFORE = r"""
#include <ucontext.h>
#include <cstdlib>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned long long exchanged[2][32];
static unsigned num_exchanges[32];
static ucontext_t scheduler, lanes[32];
static unsigned current;

template <typename T> T __ldcs(const T* from) { return *from; }
template <typename T> void __stcs(T* to, T value) { *to = value; }
static void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }

// Two buffers in turn: a lane may write its next value before all have read this one.
static unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int mask)
{
    const unsigned me = current;
    const unsigned turn = num_exchanges[me]++ & 1;
    exchanged[turn][me] = value;
    swapcontext(&lanes[me], &scheduler);
    return exchanged[turn][me ^ mask];
}
"""

_AFTER = r"""
static struct {
    const Segment* table; const int* page_ids; Word* packed; u64* checksums;
    i64 num_ids, num_segments, page_words;
} call;
static bool finished[32];

static void lane_main()
{
    kvtier_copy_pages(call.table, call.page_ids, call.packed, call.checksums, call.num_ids,
                      call.num_segments, call.page_words);
    finished[current] = true;
}

static void run_warp(unsigned first_x, unsigned y)
{
    static char stacks[32][1 << 16];
    for (unsigned lane = 0; lane < 32; ++lane) {
        finished[lane] = false;
        num_exchanges[lane] = 0;
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks[lane];
        lanes[lane].uc_stack.ss_size = sizeof stacks[lane];
        lanes[lane].uc_link = &scheduler;
        makecontext(&lanes[lane], lane_main, 0);
    }
    for (unsigned done = 0; done < 32;) {
        for (current = 0; current < 32; ++current) {
            if (finished[current]) continue;
            threadIdx = {first_x + current, y, 0};
            swapcontext(&scheduler, &lanes[current]);
            done += finished[current];
        }
    }
}

extern "C" void launch(const unsigned* grid, const unsigned* block, const Segment* table,
                       const int* page_ids, Word* packed, u64* checksums, i64 num_ids,
                       i64 num_segments, i64 page_words)
{
    call = {table, page_ids, packed, checksums, num_ids, num_segments, page_words};
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    if (block[0] % 32 != 0) abort();
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
                for (unsigned y = 0; y < block[1]; ++y)
                    for (unsigned x = 0; x < block[0]; x += 32) run_warp(x, y);
}
"""

_Three = ctypes.c_uint * 3


def compile_for_host(variant: Variant, compiler: str, folder: Path) -> ctypes.CDLL:
    """The kernel's variant as a library with one function, `launch`."""
    name = f"w{variant.word_bytes}s{int(variant.scatter)}c{int(variant.checksum)}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_BEFORE + SOURCE + _AFTER)
    flags = ["-O1", "-w", "-shared", "-fPIC", *variant.options]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class HostCudaCopy:
    """`CupyCopy` in host memory, its table, variants and geometry included, its checks aside."""

    name = "cuda-on-host"

    def __init__(self, libraries: dict[Variant, ctypes.CDLL], max_blocks: int | None) -> None:
        self._libraries = libraries
        self._max_blocks = max_blocks

    def gather(
        self, pool: PagedPool, page_ids: PageIds, packed: Tensor, *, checksums: Tensor | None = None
    ) -> None:
        ids = check_page_ids(page_ids, pool.num_pages, unique=False)
        self._copy(pool, ids, packed, checksums, scatter=False)

    def scatter(
        self, pool: PagedPool, page_ids: PageIds, packed: Tensor, *, checksums: Tensor | None = None
    ) -> None:
        ids = check_page_ids(page_ids, pool.num_pages, unique=True)
        self._copy(pool, ids, packed, checksums, scatter=True)

    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        if not len(ids):
            return
        word = pool.word_bytes(packed.data_ptr())
        table = torch.tensor(segment_rows(pool, word))
        if checksums is not None:
            checksums.zero_()
        geometry = make_geometry(
            len(ids), pool.num_segments, max(pool.row_bytes) // word, self._max_blocks
        )
        self._libraries[Variant(word, scatter, checksums is not None)].launch(
            _Three(*geometry.grid),
            _Three(*geometry.block),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_void_p(packed.data_ptr()),
            ctypes.c_void_p(None if checksums is None else checksums.data_ptr()),
            ctypes.c_longlong(len(ids)),
            ctypes.c_longlong(pool.num_segments),
            ctypes.c_longlong(pool.page_bytes // word),
        )
