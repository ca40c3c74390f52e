"""Triton and CuPy kernels on a real device: every case against `naive.py`, byte for byte."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from kvtier.errors import CopyError
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.cupy_copy import CupyCopy
from kvtier.kernels.cupy_views import page_array, segment_array
from kvtier.kernels.forms import Form
from kvtier.kernels.naive import gather_naive
from kvtier.kernels.triton_copy import TritonCopy

from .cases import CASES, Case, build, poisoned_packed, snapshot
from .checks import check_gather, check_parts, check_scatter
from .interpreting import forms_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="needs CuPy: pip install 'kvtier[gpu]'"
)

DEVICE = "cuda:0"
_DELAY_CYCLES = 200_000_000
_BY_NAME = {case.name: case for case in CASES}
Make = Callable[[], CopyBackend]


def _cupy_few_blocks() -> CupyCopy:
    return CupyCopy(max_blocks=3)


def _forced(form: Form) -> Make:
    return lambda: TritonCopy(form)


def _pairs(cases: list[Case]) -> list[ParameterSet]:
    """Each case with every backend and form that copies it."""
    pairs = []
    for case in cases:
        pairs.append(pytest.param(case, TritonCopy, id=f"{case.name}-triton"))
        pairs.extend(
            pytest.param(case, _forced(form), id=f"{case.name}-triton-{form}")
            for form in forms_of(case)
        )
        pairs.extend(
            pytest.param(case, make, id=f"{case.name}-{name}", marks=needs_cupy)
            for name, make in (("cupy", CupyCopy), ("cupy-3-blocks", _cupy_few_blocks))
        )
    return pairs


EVERY = _pairs(list(CASES))
PARTED = _pairs([c for c in CASES if c.ids and 2 <= len(c.typed) <= 8 and not c.is_far])
MAKERS = [
    pytest.param(TritonCopy, id="triton"),
    pytest.param(CupyCopy, id="cupy", marks=needs_cupy),
]
with_and_without_sums = pytest.mark.parametrize("sums", [False, True], ids=["plain", "sums"])


def _need_memory(case: Case) -> None:
    """Skip where a far source and a far target do not fit beside each other."""
    free, _ = torch.cuda.mem_get_info(DEVICE)
    torch_has = torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)
    if case.is_far and free + torch_has < 2.1 * case.pool_bytes:
        pytest.skip(f"needs {2.1 * case.pool_bytes / 1e9:.0f} GB of free device memory")


@pytest.mark.parametrize(("case", "make"), EVERY)
@with_and_without_sums
def test_a_gather_fills_packed_and_changes_nothing_else(case: Case, make: Make, sums: bool) -> None:
    _need_memory(case)
    check_gather(make(), case, DEVICE, sums=sums)


@pytest.mark.parametrize(("case", "make"), EVERY)
@with_and_without_sums
def test_a_scatter_fills_its_pages_and_changes_nothing_else(
    case: Case, make: Make, sums: bool
) -> None:
    _need_memory(case)
    check_scatter(make(), case, DEVICE, sums=sums)


@pytest.mark.parametrize(("case", "make"), PARTED)
def test_parts_of_a_pool_add_up_to_the_whole(case: Case, make: Make) -> None:
    check_parts(make(), case, DEVICE)


@pytest.mark.parametrize("make", MAKERS)
def test_a_copy_runs_on_the_current_stream(make: Make) -> None:
    """What was queued before it on the stream is seen, however long it takes."""
    case = _BY_NAME["gqa-bfloat16"]
    source, target, ids = build(case, DEVICE)
    on_device = torch.from_numpy(ids).to(DEVICE)
    expected = poisoned_packed(len(ids), source)
    gather_naive(source, on_device, expected)
    backend = make()
    packed = poisoned_packed(len(ids), source)
    backend.gather(source, ids, packed)
    backend.scatter(target, ids, packed)
    for tensor in target.tensors:
        tensor.view(torch.uint8).zero_()
    packed.zero_()
    torch.cuda.synchronize(DEVICE)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_DELAY_CYCLES)
        packed.copy_(expected)
        backend.scatter(target, ids, packed)
        packed.zero_()
        backend.gather(target, ids, packed)
    stream.synchronize()
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("make", MAKERS)
def test_swapped_words_and_swapped_pages_change_the_sums(make: Make) -> None:
    source, _, _ = build(_BY_NAME["ids-all"], DEVICE)
    words = source.tensors[0].view(9, -1).view(torch.int32)
    words[0, :2] = torch.tensor([5, 6], dtype=torch.int32)
    backend = make()

    def sums_of(ids: list[int]) -> list[int]:
        sums = torch.zeros(len(ids), dtype=torch.int64, device=DEVICE)
        backend.gather(source, ids, poisoned_packed(len(ids), source), checksums=sums)
        return sums.tolist()

    first, second = sums_of([0, 1])
    assert first != second
    assert sums_of([1, 0]) == [second, first]
    words[0, :2] = torch.tensor([6, 5], dtype=torch.int32)
    assert sums_of([0, 1]) == [first - 1, second]


@pytest.mark.parametrize("make", MAKERS)
def test_a_refused_scatter_writes_nothing(make: Make) -> None:
    case = _BY_NAME["mla-split"]
    source, target, _ = build(case, DEVICE)
    before = snapshot(case, target)
    backend = make()
    good = poisoned_packed(3, source)
    for ids, packed, message in (
        ([1, 2, 1], good, "occurs twice"),
        ([1, 2, 9], good, "outside the pool"),
        ([1, 2], good, "packed is"),
        ([1, 2, 3], good.cpu(), "packed is on cpu"),
    ):
        with pytest.raises(CopyError, match=message):
            backend.scatter(target, ids, packed)
    with pytest.raises(CopyError, match="checksums"):
        backend.scatter(target, [1, 2, 3], good, checksums=torch.zeros(2, dtype=torch.int64))
    assert torch.equal(snapshot(case, target), before)


@needs_cupy
def test_cupy_refuses_a_pool_in_host_memory() -> None:
    source, _, ids = build(_BY_NAME["ids-one"], "cpu")
    with pytest.raises(CopyError, match="the pool is on cpu"):
        CupyCopy().gather(source, ids, poisoned_packed(len(ids), source))


@needs_cupy
@pytest.mark.parametrize("name", ["mha-bfloat16", "mla-scales", "page-major-gap", "row-18"])
def test_a_view_shows_the_bytes_of_its_segment(name: str) -> None:
    source, _, _ = build(_BY_NAME[name], DEVICE)
    torch.cuda.synchronize(DEVICE)
    for segment, tensor in enumerate(source.tensors):
        seen = np.ascontiguousarray(segment_array(source, segment).get()).view(np.uint8)
        assert np.array_equal(
            seen.ravel(), tensor.cpu().contiguous().view(torch.uint8).numpy().ravel()
        )


@needs_cupy
def test_what_is_written_through_a_view_is_in_the_page() -> None:
    case = _BY_NAME["gaps"]
    source, _, _ = build(case, DEVICE)
    torch.cuda.synchronize(DEVICE)
    view = page_array(source, 1, 8)
    view[:] = 3.0
    view.device.synchronize()
    assert torch.equal(source.tensors[1][8], torch.full_like(source.tensors[1][8], 3.0))
    assert not torch.any(source.tensors[1][7] == 3.0)


@needs_cupy
def test_a_view_keeps_the_memory_of_its_segment() -> None:
    source, _, _ = build(_BY_NAME["ids-one"], DEVICE)
    torch.cuda.synchronize(DEVICE)
    view = segment_array(source, 0)
    kept = source.tensors[0].clone()
    address = view.data.ptr
    del source
    other = torch.zeros_like(kept)
    assert other.data_ptr() != address
    assert np.array_equal(view.get().view(np.uint8), kept.cpu().view(torch.uint8).numpy())
