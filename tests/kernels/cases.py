"""The pools and page ids that every device backend has to copy exactly."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.kernels.pool import PagedPool

RowShape = tuple[int, ...]
FAR_BYTES = 1 << 31
_NAN_EVERY = 16
_MAP_NORESERVE = 0x4000
"""Linux; the mmap module of Python 3.11 has no name for it."""


@dataclass(frozen=True)
class Case:
    """A pool to copy pages of; shapes are those of a page's row, without the page dimension.

    `segments` have `dtype`; `others` follow them, each with its own. `page_major` lays all rows of
    a page side by side in one tensor, else each segment is its own. `gap_bytes` follow each page's
    row or rows and belong to nobody; `lead_bytes` come before the first page and misalign it.
    """

    name: str
    dtype: torch.dtype
    segments: tuple[RowShape, ...]
    num_pages: int
    ids: tuple[int, ...]
    others: tuple[tuple[torch.dtype, RowShape], ...] = ()
    page_major: bool = False
    gap_bytes: int = 0
    lead_bytes: int = 0

    @property
    def typed(self) -> tuple[tuple[torch.dtype, RowShape], ...]:
        """Data type and row shape of every segment."""
        return (*((self.dtype, shape) for shape in self.segments), *self.others)

    @property
    def unique_ids(self) -> tuple[int, ...]:
        """The ids once each, in the order of their first occurrence, for a scatter."""
        return tuple(dict.fromkeys(self.ids))

    @property
    def pool_bytes(self) -> int:
        rows = sum(_row_bytes(dtype, shape) for dtype, shape in self.typed)
        gaps = self.gap_bytes * (1 if self.page_major else len(self.typed))
        return self.num_pages * (rows + gaps)

    @property
    def is_far(self) -> bool:
        """Whether the pool is too large to fill: only the watched pages are filled and compared."""
        return self.pool_bytes > FAR_BYTES

    @property
    def watched(self) -> list[int]:
        """The pages that are filled and compared: all, or those of the ids and their neighbours."""
        if not self.is_far:
            return list(range(self.num_pages))
        near = {page + step for page in self.ids for step in (-1, 0, 1)}
        return sorted(near & set(range(self.num_pages)))


def build(
    case: Case, device: torch.device | str
) -> tuple[PagedPool, PagedPool, npt.NDArray[np.int64]]:
    """A source of random bytes, a target of a position pattern, and the page ids.

    Some words of the source are all ones, a NaN in every float type; random bytes bring the other
    NaNs. Equal cases have equal bytes on every device.
    """
    source, target = (_pool(case, torch.device(device)) for _ in range(2))
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    for buffer in _buffers(source):
        _fill(case, buffer, lambda size: _random_bytes(rng, size))
    for buffer in _buffers(target):
        _fill(case, buffer, position_pattern)
    return source, target, np.asarray(case.ids, dtype=np.int64)


def snapshot(case: Case, pool: PagedPool) -> Tensor:
    """A copy on the host of all bytes of the pool, gaps included; of a far one, watched pages."""
    buffers = _buffers(pool)
    if not case.is_far:
        return torch.cat([buffer.cpu() for buffer in buffers])
    stride = pool.stride_bytes[0]
    return torch.cat(
        [b[p * stride : (p + 1) * stride].cpu() for b in buffers for p in case.watched]
    )


def position_pattern(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that tell their position, so that a row written to a wrong place is seen."""
    at = np.arange(num_bytes, dtype=np.int64)
    return ((at * 131 + (at >> 8) * 17 + 7) & 0xFF).astype(np.uint8)


def poisoned_packed(num_ids: int, pool: PagedPool) -> Tensor:
    """uint8[num_ids, page_bytes] on the pool's device that holds the position pattern."""
    pattern = position_pattern(num_ids * pool.page_bytes)
    return torch.from_numpy(pattern).view(num_ids, pool.page_bytes).to(pool.device)


def _random_bytes(rng: np.random.Generator, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Random bytes of which about one 4-byte word in sixteen is all ones."""
    words = rng.integers(0, 1 << 32, size=num_bytes // 4 + 1, dtype=np.uint32)
    words[rng.integers(0, _NAN_EVERY, size=words.size) == 0] = 0xFFFFFFFF
    return words.view(np.uint8)[:num_bytes]


def _row_bytes(dtype: torch.dtype, shape: RowShape) -> int:
    return math.prod(shape) * dtype.itemsize


def _pool(case: Case, device: torch.device) -> PagedPool:
    groups = [case.typed] if case.page_major else [(segment,) for segment in case.typed]
    tensors: list[Tensor] = []
    for group in groups:
        rows = [_row_bytes(dtype, shape) for dtype, shape in group]
        stride = sum(rows) + case.gap_bytes
        flat = _allocate(case.lead_bytes + case.num_pages * stride, device)
        pages = flat[case.lead_bytes :].view(case.num_pages, stride)
        begin = 0
        for (dtype, shape), row in zip(group, rows, strict=True):
            tensors.append(pages[:, begin : begin + row].view(dtype).unflatten(1, shape))
            begin += row
    return PagedPool.of(tensors)


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """uint8[num_bytes] without a value; on the host, large ones take no memory until written."""
    if device.type != "cpu" or num_bytes <= FAR_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def _buffers(pool: PagedPool) -> list[Tensor]:
    """The memory under a pool's tensors as flat uint8, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in pool.tensors}
    empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return [empty.new_empty(0).set_(storage) for storage in storages.values()]


def _fill(case: Case, buffer: Tensor, make: Callable[[int], npt.NDArray[np.uint8]]) -> None:
    if not case.is_far:
        buffer.copy_(torch.from_numpy(make(buffer.numel())))
        return
    stride = buffer.numel() // case.num_pages
    for page in case.watched:
        buffer[page * stride : (page + 1) * stride] = torch.from_numpy(make(stride)).to(
            buffer.device
        )


def _layers(num_layers: int, *shapes: RowShape) -> tuple[RowShape, ...]:
    return shapes * num_layers


_IDS = (5, 0, 7, 3)
_HALF = torch.bfloat16
_TOKEN_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = [
    Case(f"{attention}-{_short(dtype)}", dtype, segments, 9, _IDS)
    for dtype in _TOKEN_DTYPES
    for attention, segments in (
        ("mha", _layers(1, (4, 4, 64), (4, 4, 64))),
        ("gqa", _layers(2, (16, 1, 128), (16, 1, 128))),
        ("mla", _layers(2, (4, 576))),
    )
]
_ROWS = [
    Case("row-656", torch.uint8, _layers(2, (1, 656)), 9, _IDS),
    Case("row-1152", _HALF, _layers(2, (1, 576)), 9, _IDS),
    Case("row-18432", _HALF, _layers(2, (16, 576)), 9, _IDS),
    Case("row-16", torch.uint8, _layers(2, (16,)), 9, _IDS),
    Case("row-20", torch.float32, _layers(2, (5,)), 9, _IDS),
    Case("row-18", _HALF, _layers(2, (9,)), 9, _IDS),
    Case("row-1", torch.uint8, _layers(3, (1,)), 9, _IDS),
    Case("row-1021", torch.uint8, _layers(2, (1021,)), 9, _IDS),
    Case("row-4100", torch.uint8, _layers(2, (4100,)), 9, _IDS),
    Case("mla-split", _HALF, _layers(2, (16, 512), (16, 64)), 9, _IDS),
    Case(
        "mla-scales",
        torch.float8_e4m3fn,
        _layers(2, (16, 512)),
        9,
        _IDS,
        others=((torch.float32, (16, 4)), (_HALF, (16, 64))),
    ),
    Case("uneven-words", torch.uint8, ((33,), (7,), (64,)), 9, _IDS),
]
_PLACES = [
    Case("page-major", _HALF, _layers(3, (4, 2, 64)), 9, _IDS, page_major=True),
    Case("page-major-gap", _HALF, _layers(2, (16, 64), (16, 8)), 9, _IDS, (), True, 48),
    Case("gaps", torch.float16, _layers(2, (4, 128)), 9, _IDS, gap_bytes=32),
    Case("lead-4", torch.float32, _layers(2, (4, 64)), 9, _IDS, lead_bytes=4),
    Case("lead-1", torch.uint8, _layers(2, (256,)), 9, _IDS, lead_bytes=1),
    Case("far", torch.uint8, ((1 << 16,),), 9 << 16, (0, 1 << 15, 1 << 17, (9 << 16) - 1)),
]
_LISTS = [
    Case("ids-empty", _HALF, _layers(2, (4, 128)), 9, ()),
    Case("ids-one", _HALF, _layers(2, (4, 128)), 9, (4,)),
    Case("ids-last", _HALF, _layers(2, (4, 128)), 9, (8,)),
    Case("ids-all", _HALF, _layers(1, (4, 128)), 9, tuple(range(9))),
    Case("ids-repeated", _HALF, _layers(2, (4, 128)), 9, (2, 8, 2, 0, 2)),
    Case("one-page-pool", _HALF, _layers(2, (4, 128)), 1, (0,)),
]
_DEPTHS = [
    Case("layers-1", _HALF, _layers(1, (4, 128), (4, 128)), 5, (4, 1)),
    Case("layers-7", _HALF, _layers(7, (4, 128), (4, 128)), 5, (4, 1)),
    Case("layers-64", _HALF, _layers(64, (2, 64), (2, 64)), 3, (2,)),
    Case("layers-64-mla", _HALF, _layers(64, (1, 576)), 3, (2, 0)),
]

CASES = (*_DTYPES, *_ROWS, *_PLACES, *_LISTS, *_DEPTHS)
