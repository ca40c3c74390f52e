"""A device's pages: memory of our own, or the tensors of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from kvtier.errors import CapacityError, PoolError
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor, torch
from kvtier.layout import KVLayout
from kvtier.memory.pages import PageAllocator
from kvtier.memory.sizes import at_least

_WORD_BYTES = 16  # the widest that kernels copy by
_MOST_BYTES = 2**63 - 1  # of an allocation, as torch counts


class DevicePool:
    """Layer-first pages on one device, CPU or other, and which of them are free.

    `pool` has the segments of layer 0, then those of layer 1, ...: `layers[i]` are the indices of
    layer i's. A packed page has its rows in this order.
    """

    def __init__(self, pool: PagedPool, layers: Sequence[range]) -> None:
        self.pool = pool
        self.layers = tuple(layers)
        self.pages = PageAllocator(pool.num_pages)

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        num_pages: int,
        device: str | torch.device = "cpu",
        *,
        page_size: int | None = None,
    ) -> DevicePool:
        """uint8[num_pages, row_bytes * page_size] per segment of `layout`, bytes undefined.

        All segments are in one allocation, one after the other. `page_size` in tokens, the
        layout's own if not given. Raises CapacityError when the device has not got the memory,
        PoolError when torch cannot use it.
        """
        if num_pages < 1:
            raise PoolError(f"num_pages={num_pages}; pass 1 or more")
        if page_size is not None:
            layout = replace(layout, page_size=page_size)
        segments = sorted(layout.segments, key=lambda segment: segment.layer)
        rows = [segment.row_bytes * layout.page_size for segment in segments]
        tensors = _segments(rows, num_pages, _usable(device))
        sizes = [len(list(group)) for _, group in groupby(segments, lambda s: s.layer)]
        return cls(PagedPool.of(tensors), _ranges(sizes))

    @classmethod
    def adopt(
        cls, layers: Iterable[Tensor | Sequence[Tensor]], *, page_size: int = 1
    ) -> DevicePool:
        """A pool over an engine's own tensors [slots, ...], without a copy; it keeps them alive.

        One entry per layer: a tensor (MLA), or several ([K, V]). Page p is slots
        [p * page_size, (p + 1) * page_size). Every page is free at first: take those that the
        engine keeps for itself. Raises PoolError where slots are no whole number of pages, and
        CopyError where tensors make no pool (PagedPool.of).
        """
        grouped = _by_layer(layers)
        tensors = [tensor for layer in grouped for tensor in layer]
        paged = [_paged(at, tensor, page_size) for at, tensor in enumerate(tensors)]
        return cls(PagedPool.of(paged), _ranges([len(layer) for layer in grouped]))

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, without what lies between them."""
        return self.num_pages * self.page_bytes


def _ranges(sizes: Sequence[int]) -> list[range]:
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _segments(rows: Sequence[int], num_pages: int, device: torch.device) -> list[Tensor]:
    """One tensor uint8[num_pages, row] per row size, side by side in one allocation."""
    begins, end = [], 0
    for row in rows:
        # As wide a word as the row allows; equal rows stay without gaps, one stride throughout.
        begins.append(end + -end % math.gcd(row, _WORD_BYTES))
        end = begins[-1] + num_pages * row
    memory = _empty(end, device)
    return [
        memory[begin : begin + num_pages * row].view(num_pages, row)
        for begin, row in zip(begins, rows, strict=True)
    ]


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch is without CUDA
        raise PoolError(f"device {str(device)!r} cannot be used: {_first_line(error)}") from error


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    if num_bytes > _MOST_BYTES:
        raise CapacityError(
            f"{device} has no {at_least(num_bytes)} for the pool; ask for fewer pages"
        )
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU raises no other
        raise CapacityError(
            f"{device} has no {at_least(num_bytes)} for the pool ({_first_line(error)}); ask for "
            "fewer pages"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _by_layer(layers: Iterable[Tensor | Sequence[Tensor]]) -> list[list[Tensor]]:
    if isinstance(layers, Tensor) or not isinstance(layers, Iterable):
        raise PoolError(f"layers are a {type(layers).__name__}; pass a list, an entry per layer")
    grouped: list[list[Tensor]] = []
    for at, layer in enumerate(layers):
        tensors = [layer] if isinstance(layer, Tensor) else layer
        if not isinstance(tensors, list | tuple) or not tensors:
            raise PoolError(f"layer {at} is {layer!r}; pass a tensor, or a list of its tensors")
        grouped.append(list(tensors))
    return grouped


def _paged(at: int, tensor: Tensor, page_size: int) -> Tensor:
    if page_size < 1:
        raise PoolError(f"page_size={page_size}; pass 1 or more")
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or page_size == 1:
        return tensor  # PagedPool says what is wrong with it, if anything
    num_pages, left = divmod(tensor.shape[0], page_size)
    if left:
        raise PoolError(
            f"segment {at} has {tensor.shape[0]} slots, no whole number of pages of {page_size}; "
            f"pass its first {num_pages * page_size}"
        )
    return tensor.view(num_pages, page_size, *tensor.shape[1:])
