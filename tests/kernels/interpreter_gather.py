"""A gather in every form equals the naive one, compared as bytes over all the memory there is."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels.forms import Form
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import TritonCopy

from .cases import Case, build, position_pattern
from .checks import check_gather
from .interpreting import (
    BY_NAME,
    GUARD_BYTES,
    address_space_for,
    cases_by_form,
    expected_packed,
    guarded,
    require_interpreter,
    skip_bad_pair,
    untouched,
)

require_interpreter()
pytestmark = skip_bad_pair


@pytest.mark.parametrize(("case", "form"), cases_by_form())
def test_a_gather_fills_packed_and_changes_nothing_else(case: Case, form: Form) -> None:
    with address_space_for(case):
        check_gather(TritonCopy(form), case, "cpu", sums=False)


@pytest.mark.parametrize("name", ["row-656", "row-18432", "mla-split"])
def test_the_form_chosen_for_the_rows_copies_them(name: str) -> None:
    case = BY_NAME[name]
    source, _, ids = build(case, "cpu")
    packed = guarded(len(ids), source)
    TritonCopy().gather(source, ids, packed.rows)
    assert torch.equal(packed.rows, expected_packed(source, case.ids))


@pytest.mark.parametrize("num_programs", [1, 3, 100])
def test_any_number_of_persistent_programs_copies_all_pages(num_programs: int) -> None:
    case = BY_NAME["ids-all"]
    source, _, ids = build(case, "cpu")
    packed = guarded(len(ids), source)
    TritonCopy(Form.PERSISTENT, num_programs).gather(source, ids, packed.rows)
    assert torch.equal(packed.rows, expected_packed(source, case.ids))


@pytest.mark.parametrize("lead_bytes", [GUARD_BYTES + 8, GUARD_BYTES + 4, GUARD_BYTES + 3])
@pytest.mark.parametrize("name", ["row-1152", "row-18432", "mla-split"])
def test_a_packed_buffer_at_any_address_is_filled(name: str, lead_bytes: int) -> None:
    case = BY_NAME[name]
    source, _, _ = build(case, "cpu")
    ids = case.ids[:2]
    packed = guarded(len(ids), source, lead_bytes)
    before = packed.whole.clone()
    TritonCopy().gather(source, ids, packed.rows)
    assert torch.equal(packed.rows, expected_packed(source, ids))
    assert torch.equal(packed.whole[:lead_bytes], before[:lead_bytes])
    assert torch.equal(packed.whole[-GUARD_BYTES:], before[-GUARD_BYTES:])


def test_one_copier_serves_packed_buffers_at_different_addresses() -> None:
    case = BY_NAME["row-1152"]
    source, _, ids = build(case, "cpu")
    copier = TritonCopy()
    for lead_bytes in (GUARD_BYTES, GUARD_BYTES + 4, GUARD_BYTES + 1, GUARD_BYTES):
        packed = guarded(len(ids), source, lead_bytes)
        copier.gather(source, ids, packed.rows)
        assert torch.equal(packed.rows, expected_packed(source, case.ids))


@pytest.mark.parametrize("form", Form)
def test_a_gather_of_one_segment_fills_its_part_of_packed(form: Form) -> None:
    case = BY_NAME["gqa-bfloat16"]
    if form is Form.SMALL:
        case = BY_NAME["row-656"]
    source, _, ids = build(case, "cpu")
    packed = guarded(len(ids), source)
    expected = packed.whole.clone()
    begin, end = source.offset_bytes[1], source.offset_bytes[1] + source.row_bytes[1]
    rows = expected[GUARD_BYTES:-GUARD_BYTES].view(len(ids), source.page_bytes)
    rows[:, begin:end] = expected_packed(source, case.ids)[:, begin:end]
    TritonCopy(form).gather(source.segments(1, 1), ids, packed.rows)
    assert torch.equal(packed.whole, expected)


@pytest.mark.parametrize("form", Form)
def test_offsets_in_packed_may_pass_2_to_31_words(form: Form) -> None:
    num_pages, row_bytes, huge_bytes = 3, 64, 24 << 30
    assert 2 * huge_bytes // 16 > 1 << 31
    small = position_pattern(num_pages * row_bytes)
    rows = torch.from_numpy(small).view(num_pages, row_bytes)
    pool = PagedPool.of([untouched(num_pages, huge_bytes), rows])
    packed = untouched(num_pages, pool.page_bytes)
    copier = TritonCopy(form)
    copier.gather(pool.segments(1, 1), [2, 0, 1], packed)
    assert torch.equal(packed[:, huge_bytes:], rows[[2, 0, 1]])
    rows.zero_()
    copier.scatter(pool.segments(1, 1), [0, 1, 2], packed)
    assert torch.equal(rows, packed[:, huge_bytes:])
