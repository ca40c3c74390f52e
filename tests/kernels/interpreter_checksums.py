"""The checksums that kernels sum while they copy are those of numpy, and see swaps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtier.kernels.forms import Form
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import TritonCopy

from .cases import Case, build, snapshot
from .checks import check_gather, check_scatter
from .interpreting import (
    BY_NAME,
    address_space_for,
    cases_by_form,
    expected_sums,
    guarded,
    poisoned_sums,
    require_interpreter,
    skip_bad_pair,
)

require_interpreter()
pytestmark = skip_bad_pair

SUMMED = (
    "mha-float8_e5m2",
    "gqa-bfloat16",
    "mla-float32",
    "row-16",
    "row-18",
    "row-20",
    "row-1",
    "row-656",
    "row-1021",
    "row-1152",
    "row-4100",
    "row-18432",
    "mla-split",
    "mla-scales",
    "uneven-words",
    "page-major",
    "page-major-gap",
    "lead-4",
    "lead-1",
    "far",
    "ids-empty",
    "ids-repeated",
    "one-page-pool",
    "layers-7",
)
# Form of the kernel: rows of two segments that it copies.
SWAPPED = {
    Form.PAGE: "row-18432",
    Form.SMALL: "row-656",
    Form.PERSISTENT: "row-4100",
    Form.MIXED: "mla-split",
}


@pytest.mark.parametrize(("case", "form"), cases_by_form(*SUMMED))
def test_both_directions_give_the_checksums_of_numpy(case: Case, form: Form) -> None:
    with address_space_for(case):
        check_gather(TritonCopy(form), case, "cpu", sums=True)
        check_scatter(TritonCopy(form), case, "cpu", sums=True)


def test_a_page_that_is_gathered_twice_has_its_checksum_twice() -> None:
    case = BY_NAME["ids-repeated"]
    source, _, ids = build(case, "cpu")
    packed, sums = guarded(len(ids), source), poisoned_sums(len(ids))
    TritonCopy().gather(source, ids, packed.rows, checksums=sums)
    assert torch.equal(sums, expected_sums(packed.rows))
    assert sums[0] == sums[2] == sums[4]


@pytest.mark.parametrize(("case", "form"), cases_by_form("row-656", "row-18", "mla-split"))
def test_checksums_of_parts_add_up_to_that_of_the_page(case: Case, form: Form) -> None:
    source, _, ids = build(case, "cpu")
    packed, whole = guarded(len(ids), source), poisoned_sums(len(ids))
    copier = TritonCopy(form)
    copier.gather(source, ids, packed.rows, checksums=whole)
    total = torch.zeros_like(whole)
    for segment in range(source.num_segments):
        part, others_zero = poisoned_sums(len(ids)), torch.zeros_like(packed.rows)
        begin = source.offset_bytes[segment]
        columns = slice(begin, begin + source.row_bytes[segment])
        others_zero[:, columns] = packed.rows[:, columns]
        copier.gather(source.segments(segment, 1), ids, packed.rows, checksums=part)
        assert torch.equal(part, expected_sums(others_zero))
        total += part
    assert torch.equal(total, whole)


@pytest.mark.parametrize("form", Form)
def test_two_swapped_words_change_the_checksum_of_their_page_alone(form: Form) -> None:
    before, after = _sums_around(form, _swap_words)
    assert before[1] != after[1]
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])


@pytest.mark.parametrize("form", Form)
def test_two_swapped_pages_change_both_checksums(form: Form) -> None:
    before, after = _sums_around(form, _swap_pages)
    assert before[0] != before[1]
    assert torch.equal(after, before[[1, 0, 2, 3]])


@pytest.mark.parametrize("form", Form)
def test_the_same_rows_in_swapped_segments_change_the_checksum(form: Form) -> None:
    before, after = _sums_around(form, _swap_segments)
    assert before[1] != after[1]


def _sums_around(
    form: Form, damage: Callable[[PagedPool, list[int]], None]
) -> tuple[Tensor, Tensor]:
    """Checksums of the pages of a case before and after its pool is damaged."""
    case = BY_NAME[SWAPPED[form]]
    source, _, ids = build(case, "cpu")
    copier, packed = TritonCopy(form), guarded(len(ids), source)
    before, after = (poisoned_sums(len(ids)) for _ in range(2))
    copier.gather(source, ids, packed.rows, checksums=before)
    unchanged = snapshot(case, source)
    damage(source, [int(page) for page in ids])
    assert not torch.equal(snapshot(case, source), unchanged)
    copier.gather(source, ids, packed.rows, checksums=after)
    return before, after


def _row(pool: PagedPool, segment: int, page: int) -> Tensor:
    return pool.tensors[segment][page].flatten().view(torch.uint8)


def _swap_words(pool: PagedPool, pages: list[int]) -> None:
    words = _row(pool, 1, pages[1]).view(torch.int32)
    words[[3, 70]] = words[[70, 3]]


def _swap_pages(pool: PagedPool, pages: list[int]) -> None:
    for segment in range(pool.num_segments):
        _swap_rows(_row(pool, segment, pages[0]), _row(pool, segment, pages[1]))


def _swap_segments(pool: PagedPool, pages: list[int]) -> None:
    first, second = (_row(pool, segment, pages[1]) for segment in (0, 1))
    size = min(len(first), len(second))
    _swap_rows(first[:size], second[:size])


def _swap_rows(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
