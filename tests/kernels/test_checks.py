"""What is refused before anything is copied: pools, page ids, devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch

from kvtier.errors import CopyError
from kvtier.kernels.forms import Form
from kvtier.kernels.ids import check_page_ids
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.tables import SegmentTables
from kvtier.kernels.triton_copy import TritonCopy, interpreted

BAD_POOLS = {
    "no-segment": (list, r"needs at least one segment"),
    "one-dimension": (lambda: [torch.zeros(8)], r"segment 0 has shape \(8,\)"),
    "no-page": (lambda: [torch.zeros(0, 8)], r"shape \(0, 8\): nothing to copy"),
    "empty-row": (lambda: [torch.zeros(4, 0)], r"shape \(4, 0\): nothing to copy"),
    "page-counts": (
        lambda: [torch.zeros(4, 8), torch.zeros(5, 8)],
        r"segment 1 has 5 pages, segment 0 has 4",
    ),
    "devices": (
        lambda: [torch.zeros(4, 8), torch.zeros(4, 8, device="meta")],
        r"segment 1 is on meta, segment 0 on cpu",
    ),
    "rows-with-holes": (
        lambda: [torch.zeros(4, 8), torch.zeros(4, 8, 2)[:, :, 0]],
        r"a page of segment 1 is not contiguous",
    ),
    "rows-transposed": (
        lambda: [torch.zeros(4, 8, 2).transpose(1, 2)],
        r"a page of segment 0 is not contiguous",
    ),
    "too-many-pages": (
        lambda: [torch.empty(1 << 31, 1, dtype=torch.uint8, device="meta")],
        r"a pool of 2147483648 pages; ids are int32, so at most 2147483647 fit",
    ),
    "a-tensor": (lambda: torch.zeros(4, 8), r"takes a list of tensors.*pass \[tensor\]"),
    "nothing": (lambda: None, r"takes a list of tensors, not a NoneType"),
    "arrays": (lambda: [np.zeros((4, 8))], r"segment 0 is of type ndarray; pass a torch tensor"),
    "a-gap": (lambda: [torch.zeros(4, 8), None], r"segment 1 is of type NoneType"),
    "keys": (lambda: {0: torch.zeros(4, 8)}, r"segment 0 is of type int"),
    "sparse": (lambda: [torch.eye(4).to_sparse()], r"segment 0 is sparse or nested"),
    "same-tensor-twice": (
        lambda: [torch.zeros(4, 8)] * 2,
        r"segments 0 and 1 overlap; each needs its own memory",
    ),
    "next-page": (
        lambda: [(m := torch.zeros(5, 8))[:4], m[1:]],
        r"segments 0 and 1 overlap",
    ),
    "half-a-row": (
        lambda: [torch.zeros(4, 8), (m := torch.zeros(4, 8))[:, :5], m[:, 4:]],
        r"segments 1 and 2 overlap",
    ),
    "overlapping": (
        lambda: [torch.as_strided(torch.zeros(64), (4, 8), (4, 1))],
        r"pages of segment 0 overlap; strides \(4, 1\)",
    ),
    "expanded": (
        lambda: [torch.zeros(1, 8).expand(4, 8)],
        r"pages of segment 0 overlap; strides \(0, 1\)",
    ),
}
BAD_IDS = {
    "beyond": ([0, 3], r"page id 3 at 1 is outside the pool of 3 pages"),
    "negative": ([1, 2, -2], r"page id -2 at 2 is outside"),
    "wraps-in-32-bits": (np.array([1 << 32]), r"page id 4294967296 at 0 is outside"),
    "float": ([1.0], r"dtype float64; pass integers"),
    "text": (["1"], r"dtype <U1; pass integers"),
    "bool": (np.array([True]), r"dtype bool; pass integers"),
    "two-dimensions": ([[1]], r"shape \(1, 1\); pass one dimension"),
    "ragged": ([[1], [2, 0]], r"page ids make no array of one dimension"),
    "bool-among-integers": ([True, 2], r"dtype bool; pass integers"),
    "bool-in-a-tuple": ((1, np.True_), r"dtype bool; pass integers"),
    "nothing": (None, r"shape \(\); pass one dimension, a list or array of integers"),
    "generator": ((i for i in (1, 2)), r"shape \(\); pass one dimension, a list or array"),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), r"page ids are a masked array"),
    "wider-than-64-bits": ([0, 1 << 70], r"page id 1180591620717411303424 at 1 is outside"),
    "negative-and-wide": ([-1, 1 << 70], r"page id -1 at 0 is outside"),
    "top-of-uint64": ([1, np.uint64(2**64 - 1)], r"page id 18446744073709551615 at 1 is outside"),
    "float-tensor": (torch.tensor([1.0]), r"page ids are torch\.float32 on cpu; pass integers"),
    "half-tensor": (torch.tensor([1], dtype=torch.bfloat16), r"torch\.bfloat16 on cpu"),
    "bool-tensor": (torch.tensor([True]), r"dtype bool; pass integers"),
    "tensor-elsewhere": (torch.empty(1, dtype=torch.int32, device="meta"), r"int32 on meta"),
    "sparse-tensor": (torch.tensor([1]).to_sparse(), r"pass integers in host memory"),
    "tensor-of-two-dimensions": (torch.tensor([[1]]), r"shape \(1, 1\)"),
}


@pytest.mark.parametrize(("make", "message"), BAD_POOLS.values(), ids=BAD_POOLS.keys())
def test_tensors_that_are_no_pool_are_refused_in_one_line(
    make: Callable[[], list[torch.Tensor]], message: str
) -> None:
    with pytest.raises(CopyError, match=message) as caught:
        PagedPool.of(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("segments", [(0, 0), (-1, 1), (0, 3), (2, 1), (1, 2)])
def test_segments_that_a_pool_has_not_are_refused(segments: tuple[int, int]) -> None:
    pool = PagedPool.of([torch.zeros(4, 8), torch.zeros(4, 8)])
    with pytest.raises(CopyError, match=r"outside the pool's 2"):
        pool.segments(*segments)


@pytest.mark.parametrize(("ids", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
@pytest.mark.parametrize("unique", [False, True])
def test_page_ids_that_name_no_page_are_refused(ids: object, message: str, unique: bool) -> None:
    with pytest.raises(CopyError, match=message) as caught:
        check_page_ids(ids, 3, unique=unique)
    assert "\n" not in str(caught.value)


def test_a_repeated_id_is_refused_where_ids_have_to_be_unique() -> None:
    assert list(check_page_ids([2, 0, 2], 3, unique=False)) == [2, 0, 2]
    with pytest.raises(CopyError, match=r"page id 2 occurs twice"):
        check_page_ids([2, 0, 2], 3, unique=True)


def test_checked_ids_are_contiguous_int32_and_may_be_none() -> None:
    every_other = np.arange(8, dtype=np.uint64)[::2]
    for ids in ([], (), np.empty(0, dtype=np.float64), every_other, [1]):
        checked = check_page_ids(ids, 9, unique=True)
        assert checked.dtype == np.int32
        assert checked.flags.c_contiguous
        assert len(checked) == len(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [1, np.uint64(5)],
        (np.int64(1), np.uint64(5)),
        range(1, 6, 4),
        np.frombuffer(np.array([1, 5], dtype=np.int32).tobytes(), dtype=np.int32),
        np.array([1, 5], dtype=np.int32),
        *(torch.tensor([1, 5], dtype=d) for d in (torch.int8, torch.int64, torch.uint16)),
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', '')}",
)
def test_integers_of_any_kind_are_taken_as_a_copy_of_their_own(ids: Any) -> None:
    checked = check_page_ids(ids, 6, unique=True)
    assert checked.tolist() == [1, 5]
    assert checked.flags.writeable
    if isinstance(ids, np.ndarray):
        assert not np.shares_memory(checked, ids)


def test_more_pages_than_int32_ids_can_name_are_refused() -> None:
    assert check_page_ids([(1 << 31) - 2], (1 << 31) - 1, unique=False).tolist() == [2147483646]
    with pytest.raises(CopyError, match=r"a pool of 2147483648 pages"):
        check_page_ids([0], 1 << 31, unique=False)


def test_any_iterable_of_tensors_makes_a_pool() -> None:
    pool = PagedPool.of(torch.zeros(4, 8) for _ in range(2))
    assert (pool.num_segments, pool.num_pages, pool.page_bytes) == (2, 4, 64)


@pytest.mark.parametrize("segments", [(1.0, 1), (None, 1), (0, "1")])
def test_segments_are_counted_in_integers(segments: tuple[Any, Any]) -> None:
    with pytest.raises(CopyError, match="pass two integers"):
        PagedPool.of([torch.zeros(4, 8)]).segments(*segments)


def test_equal_parts_of_a_pool_are_one_object_with_one_table() -> None:
    pool, tables = PagedPool.of(torch.zeros(4, 8) for _ in range(3)), SegmentTables()
    assert pool.segments(0, 3) is pool
    assert pool.segments(1, 2) is pool.segments(1, 2)
    assert pool.segments(1, 1) is not pool.segments(1, 2)
    first = tables.table(pool.segments(1, 1), 16)
    assert tables.table(pool.segments(1, 1), 16) is first


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("form", [None, *Form])
@pytest.mark.parametrize("ids", [[1], []])
def test_triton_refuses_host_tensors_that_no_interpreter_copies(
    verb: str, form: Form | None, ids: list[int]
) -> None:
    assert not interpreted()
    pool = PagedPool.of([torch.full((3, 64), 5, dtype=torch.uint8)])
    packed = torch.full((len(ids), 64), 7, dtype=torch.uint8)
    sums = torch.full((len(ids),), 9)
    with pytest.raises(
        CopyError, match=r"the pool is on cpu, Triton copies CUDA tensors"
    ) as caught:
        getattr(TritonCopy(form), verb)(pool, ids, packed, checksums=sums)
    assert "\n" not in str(caught.value)
    assert (pool.tensors[0] == 5).all()
    assert (packed == 7).all()
    assert (sums == 9).all()


@pytest.mark.parametrize(
    ("row_bytes", "lead_bytes", "packed_address", "expected"),
    [
        (656, 0, 64, 16),
        (656, 0, 72, 4),
        (656, 0, 66, 1),
        (656, 4, 64, 4),
        (656, 1, 64, 1),
        (20, 0, 64, 4),
        (18, 0, 64, 1),
    ],
)
def test_words_are_as_wide_as_every_address_and_length_allows(
    row_bytes: int, lead_bytes: int, packed_address: int, expected: int
) -> None:
    flat = torch.zeros(lead_bytes + 3 * row_bytes, dtype=torch.uint8)
    pool = PagedPool.of([flat[lead_bytes:].view(3, row_bytes)])
    assert pool.word_bytes(packed_address) == expected
