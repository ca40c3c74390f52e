"""What is refused before anything is copied: pools, page ids, devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch

from kvtier.errors import CopyError
from kvtier.kernels.forms import Form
from kvtier.kernels.ids import check_page_ids
from kvtier.kernels.pool import PagedPool
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
    with pytest.raises(CopyError, match=message):
        check_page_ids(ids, 3, unique=unique)


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


def test_less_than_one_persistent_program_is_refused() -> None:
    with pytest.raises(CopyError, match=r"num_programs=0 must be at least 1"):
        TritonCopy(Form.PERSISTENT, num_programs=0)


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
