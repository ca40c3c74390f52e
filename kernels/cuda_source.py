"""The CUDA C of `CupyCopy`: one kernel, its compile-time variants, and its launch geometry."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.kernels.pool import WORD_BYTES

KERNEL_NAME = "kvtier_copy_pages"

BLOCK_THREADS = 256
WORDS_IN_FLIGHT = 4
"""Loads that a thread starts before its first store: 16 KiB a block at 16-byte words."""

_WARP = 32
_MAX_GRID_X = 2**31 - 1
_MAX_GRID_YZ = 65535
"""Limits of the CUDA C++ Programming Guide, compute capabilities."""

SOURCE = r"""
typedef long long i64;
typedef unsigned long long u64;

#if WORD_BYTES == 16
typedef uint4 Word;
#elif WORD_BYTES == 4
typedef unsigned int Word;
#else
typedef unsigned char Word;
#endif

// One segment of the pool. Stride, offset and row count words.
struct Segment {
    u64 base;
    i64 stride;
    i64 offset;
    i64 row;
};

// What the word at `at`, counted in words from the start of the page, adds to the checksum.
__device__ __forceinline__ u64 share_of(Word word, i64 at)
{
#if WORD_BYTES == 16
    const u64 x = word.x, y = word.y, z = word.z, w = word.w;
    return (x + y + z + w) * (u64)(4 * at + 1) + y + 2 * z + 3 * w;
#elif WORD_BYTES == 4
    return (u64)word * (u64)(at + 1);
#else
    return ((u64)word << (8 * (at & 3))) * (u64)(at / 4 + 1);
#endif
}

// Copies this thread's words of a row and returns their share of the checksum. A warp takes
// WARP * WORDS_IN_FLIGHT neighbouring words: a lane's are WARP apart, offsets known when compiling.
__device__ __forceinline__ u64 copy_row(const Word* from, Word* to, i64 row, i64 offset)
{
    const i64 step = (i64)blockDim.x * WORDS_IN_FLIGHT;
    const unsigned lane = threadIdx.x % WARP;
    const unsigned start = (threadIdx.x - lane) * WORDS_IN_FLIGHT + lane;
    u64 sum = 0;
    for (i64 at = blockIdx.z * step + start; at < row; at += gridDim.z * step) {
        Word words[WORDS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < WORDS_IN_FLIGHT; ++k) {
            if (at + k * WARP < row) words[k] = __ldcs(from + at + k * WARP);
        }
#pragma unroll
        for (int k = 0; k < WORDS_IN_FLIGHT; ++k) {
            if (at + k * WARP < row) {
                __stcs(to + at + k * WARP, words[k]);
#if CHECKSUM
                sum += share_of(words[k], offset + at + k * WARP);
#endif
            }
        }
    }
    return sum;
}

// All lanes of a warp are at the same page: threadIdx.x runs over whole warps.
__device__ __forceinline__ void add_warp_sum(u64* target, u64 sum)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (threadIdx.x % WARP == 0) atomicAdd(target, sum);
}

// packed[i] = page page_ids[i], or with SCATTER page page_ids[i] = packed[i].
// Grid: x pages (blockDim.y of them a block), y segments, z pieces of a row; each axis strides, so
// that any grid copies everything.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4) kvtier_copy_pages(
    const Segment* table, const int* page_ids, Word* packed, u64* checksums,
    i64 num_ids, i64 num_segments, i64 page_words)
{
    const i64 start = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    const i64 stride = (i64)gridDim.x * blockDim.y;
    for (i64 s = blockIdx.y; s < num_segments; s += gridDim.y) {
        const Segment segment = table[s];
        for (i64 i = start; i < num_ids; i += stride) {
            Word* in_pool = (Word*)segment.base + page_ids[i] * segment.stride;
            Word* in_packed = packed + i * page_words + segment.offset;
#if SCATTER
            const u64 sum = copy_row(in_packed, in_pool, segment.row, segment.offset);
#else
            const u64 sum = copy_row(in_pool, in_packed, segment.row, segment.offset);
#endif
#if CHECKSUM
            add_warp_sum(checksums + i, sum);
#endif
        }
    }
}
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compile of the kernel."""

    word_bytes: int
    scatter: bool
    checksum: bool

    @property
    def options(self) -> tuple[str, ...]:
        """Options of NVRTC, the architecture aside."""
        return (
            "-std=c++17",
            f"-DWORD_BYTES={self.word_bytes}",
            f"-DSCATTER={int(self.scatter)}",
            f"-DCHECKSUM={int(self.checksum)}",
            f"-DWORDS_IN_FLIGHT={WORDS_IN_FLIGHT}",
            f"-DBLOCK_THREADS={BLOCK_THREADS}",
            f"-DWARP={_WARP}",
        )


VARIANTS = tuple(
    Variant(word_bytes, scatter, checksum)
    for word_bytes in WORD_BYTES
    for scatter in (False, True)
    for checksum in (False, True)
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Grid and block of one launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def make_geometry(
    num_ids: int, num_segments: int, row_words: int, max_blocks: int | None = None
) -> Geometry:
    """Blocks for `num_ids` pages of `num_segments` rows, the longest of `row_words` words.

    A row takes the fewest whole warps that hold it, at most a block; shorter rows share a block
    with those of other pages. `max_blocks` bounds the grid: its blocks then stride over the work.
    """
    lanes = _WARP
    while lanes < BLOCK_THREADS and lanes * WORDS_IN_FLIGHT < row_words:
        lanes *= 2
    pages = BLOCK_THREADS // lanes
    budget = _MAX_GRID_X if max_blocks is None else max_blocks
    x = min(-(-num_ids // pages), budget)
    y = min(num_segments, _MAX_GRID_YZ, budget // x)
    z = min(-(-row_words // (lanes * WORDS_IN_FLIGHT)), _MAX_GRID_YZ, budget // (x * y))
    return Geometry((x, y, z), (lanes, pages, 1))
