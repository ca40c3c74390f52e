"""A scatter in every form equals the naive one, compared as bytes over all the memory there is."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels.forms import Form
from kvtier.kernels.naive import scatter_naive
from kvtier.kernels.triton_copy import TritonCopy

from .cases import Case, build, snapshot
from .checks import check_scatter
from .interpreting import (
    address_space_for,
    cases_by_form,
    expected_packed,
    require_interpreter,
    skip_bad_pair,
)

require_interpreter()
pytestmark = skip_bad_pair

LAYERED = (
    "gqa-bfloat16",
    "row-656",
    "row-18",
    "row-1",
    "row-4100",
    "mla-split",
    "mla-scales",
    "uneven-words",
    "page-major-gap",
    "lead-4",
    "one-page-pool",
)


@pytest.mark.parametrize(("case", "form"), cases_by_form())
def test_a_scatter_fills_its_pages_and_changes_nothing_else(case: Case, form: Form) -> None:
    with address_space_for(case):
        check_scatter(TritonCopy(form), case, "cpu", sums=False)


@pytest.mark.parametrize(("case", "form"), cases_by_form(*LAYERED))
def test_a_scatter_of_one_layer_leaves_the_others(case: Case, form: Form) -> None:
    source, target, _ = build(case, "cpu")
    _, twin, _ = build(case, "cpu")
    packed = expected_packed(source, case.unique_ids)
    middle = target.num_segments // 2
    TritonCopy(form).scatter(target.segments(middle, 1), case.unique_ids, packed)
    ids = torch.tensor(case.unique_ids, dtype=torch.int64)
    scatter_naive(twin.segments(middle, 1), ids, packed)
    assert torch.equal(snapshot(case, target), snapshot(case, twin))


@pytest.mark.parametrize(("case", "form"), cases_by_form("row-656", "mla-split", "lead-4"))
def test_scatters_layer_by_layer_equal_one_scatter(case: Case, form: Form) -> None:
    source, target, _ = build(case, "cpu")
    _, twin, _ = build(case, "cpu")
    packed = expected_packed(source, case.unique_ids)
    copier = TritonCopy(form)
    for segment in reversed(range(target.num_segments)):
        copier.scatter(target.segments(segment, 1), case.unique_ids, packed)
    copier.scatter(twin, case.unique_ids, packed)
    assert torch.equal(snapshot(case, target), snapshot(case, twin))
