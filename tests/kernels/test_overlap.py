"""Memory that a copy would both read and write is refused, and only that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtier.errors import CopyError
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.overlap import Rows, first_pair, share_bytes
from kvtier.kernels.pool import PagedPool

from .cases import position_pattern


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    row = draw(st.integers(1, 6))
    stride = row + draw(st.integers(0, 20))
    return Rows(draw(st.integers(0, 80)), draw(st.integers(1, 9)), row, stride)


def bytes_of(some: Rows) -> set[int]:
    begins = (some.base + page * some.stride for page in range(some.count))
    return {begin + at for begin in begins for at in range(some.row)}


@given(one=rows(), other=rows())
def test_rows_share_bytes_where_their_sets_of_addresses_meet(one: Rows, other: Rows) -> None:
    expected = bool(bytes_of(one) & bytes_of(other))
    assert share_bytes(one, other) == share_bytes(other, one) == expected


@given(st.lists(rows(), max_size=6))
def test_a_pair_is_named_where_any_two_share_bytes(some: list[Rows]) -> None:
    pair = first_pair(some)
    if pair is not None:
        assert pair[0] < pair[1]
        assert bytes_of(some[pair[0]]) & bytes_of(some[pair[1]])
    else:
        assert len(set().union(*map(bytes_of, some))) == sum(len(bytes_of(r)) for r in some)


@given(rows(), st.integers(0, 100), st.integers(1, 30))
def test_a_tensor_is_outside_where_it_meets_no_row(some: Rows, start: int, length: int) -> None:
    memory = torch.zeros(512, dtype=torch.uint8)
    segment = memory.as_strided((some.count, some.row), (some.stride, 1), some.base)
    pool, tensor = PagedPool.of([segment]), memory[start : start + length]
    if bytes_of(some) & set(range(start, start + length)):
        with pytest.raises(CopyError, match="it overlaps the memory of segment 0"):
            pool.check_outside("it", tensor)
    else:
        pool.check_outside("it", tensor)


def test_interleaved_rows_that_do_not_meet_make_a_pool() -> None:
    keys_values = torch.arange(6 * 2 * 16).to(torch.uint8).view(6, 2, 16)
    pool = PagedPool.of([keys_values[:, 0], keys_values[:, 1]])
    packed = torch.empty(2, 32, dtype=torch.uint8)
    with CpuCopy() as copy:
        copy.gather(pool, [4, 1], packed)
    assert torch.equal(packed, keys_values[[4, 1]].view(2, 32))


def _inside(memory: Tensor) -> tuple[Tensor, Tensor | None]:
    return memory[0, 2:4].view(1, 64), None


def _last_byte(memory: Tensor) -> tuple[Tensor, Tensor | None]:
    return memory.view(-1)[8 * 32 - 1 :][:64].view(1, 64), None


def _sums_in_pool(memory: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.zeros(1, 64, dtype=torch.uint8), memory[2, 7, :8].view(torch.int64)


def _sums_in_packed(memory: Tensor) -> tuple[Tensor, Tensor | None]:
    packed = torch.zeros(1, 64, dtype=torch.uint8)
    return packed, packed[0, 56:].view(torch.int64)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        (_inside, "packed overlaps the memory of segment 0"),
        (_last_byte, "packed overlaps the memory of segment 0"),
        (_sums_in_pool, "checksums overlaps the memory of segment 1"),
        (_sums_in_packed, "checksums overlaps packed"),
    ],
)
def test_a_copy_onto_its_own_memory_is_refused_with_nothing_written(
    place: Callable[[Tensor], tuple[Tensor, Tensor | None]], message: str, verb: str
) -> None:
    memory = torch.from_numpy(position_pattern(3 * 8 * 32)).view(3, 8, 32)
    before = memory.clone()
    packed, sums = place(memory)
    packed_before = packed.clone()
    with CpuCopy() as copy, pytest.raises(CopyError, match=message) as caught:
        getattr(copy, verb)(PagedPool.of([memory[0], memory[2]]), [5], packed, checksums=sums)
    assert "\n" not in str(caught.value)
    assert torch.equal(memory, before)
    assert torch.equal(packed, packed_before)
