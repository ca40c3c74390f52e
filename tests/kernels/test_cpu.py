"""CpuCopy copies every case exactly by every method, compared as bytes over all the memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtier.errors import CopyError
from kvtier.kernels import cpu
from kvtier.kernels.cpu import CpuCopy, choose
from kvtier.kernels.cpu_rows import CpuMethod, flat_refusal, slabs_of
from kvtier.kernels.naive import gather_naive, page_checksums, scatter_naive
from kvtier.kernels.pool import PagedPool

from .cases import CASES, Case, build, poisoned_packed, position_pattern, snapshot

METHODS = (None, *CpuMethod)
SEPARATE = Case("separate", torch.bfloat16, ((4, 128),) * 4, 9, (5, 0, 7, 3, 4))


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest copy is shared out over all threads."""
    monkeypatch.setattr(cpu, "_ALONE_BYTES", 0)


@pytest.fixture
def copy() -> Iterator[CpuCopy]:
    with CpuCopy() as backend:
        yield backend


def one_allocation(
    num_segments: int, num_pages: int, row_bytes: int, seed: int = 0
) -> tuple[PagedPool, Tensor]:
    """A pool of random bytes laid out [segment][page][row], and the memory under it."""
    rng = np.random.default_rng(seed)
    memory = torch.from_numpy(
        rng.integers(0, 256, (num_segments, num_pages, row_bytes), dtype=np.uint8)
    )
    return PagedPool.of(list(memory)), memory


def refuses(method: CpuMethod | None, pool: PagedPool, packed: Tensor) -> bool:
    return method is CpuMethod.FLAT and any(
        flat_refusal(slab, packed.numpy()) for slab in slabs_of(pool)
    )


def gathered(pool: PagedPool, ids: npt.NDArray[np.int64]) -> Tensor:
    packed = torch.zeros((ids.size, pool.page_bytes), dtype=torch.uint8)
    gather_naive(pool, torch.from_numpy(ids), packed)
    return packed


def sums_of(packed: Tensor) -> Tensor:
    return torch.from_numpy(page_checksums(packed.numpy()))


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gather_equals_naive_and_leaves_the_pool_alone(
    case: Case, method: CpuMethod | None
) -> None:
    pool, _, ids = build(case, "cpu")
    before = snapshot(case, pool)
    packed = poisoned_packed(ids.size, pool)
    sums = torch.full((ids.size,), -1)
    with CpuCopy(2, method) as backend:
        if ids.size and refuses(method, pool, packed):
            with pytest.raises(CopyError, match="method flat cannot"):
                backend.gather(pool, ids, packed, checksums=sums)
            assert torch.equal(packed, poisoned_packed(ids.size, pool))
            return
        backend.gather(pool, ids, packed, checksums=sums)
    expected = gathered(pool, ids)
    assert torch.equal(packed, expected)
    assert torch.equal(sums, sums_of(expected))
    assert torch.equal(snapshot(case, pool), before)


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scatter_writes_the_named_pages_and_no_other_byte(
    case: Case, method: CpuMethod | None
) -> None:
    source, target, _ = build(case, "cpu")
    _, expected, _ = build(case, "cpu")
    ids = np.asarray(case.unique_ids, dtype=np.int64)
    packed = gathered(source, ids)
    sums = torch.full((ids.size,), -1)
    with CpuCopy(2, method) as backend:
        if ids.size and refuses(method, target, packed):
            with pytest.raises(CopyError, match="method flat cannot"):
                backend.scatter(target, ids, packed, checksums=sums)
        else:
            backend.scatter(target, ids, packed, checksums=sums)
            scatter_naive(expected, torch.from_numpy(ids), packed)
            assert torch.equal(sums, sums_of(packed))
    assert torch.equal(snapshot(case, target), snapshot(case, expected))


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("num_threads", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row_bytes", [3, 656, 1152, 4096, 18432, 65536])
def test_inside_one_allocation_every_method_copies_exactly(
    row_bytes: int, method: CpuMethod | None, num_threads: int
) -> None:
    pool, memory = one_allocation(5, 11, row_bytes)
    target, target_memory = one_allocation(5, 11, row_bytes, seed=1)
    ids = np.array([10, 3, 4, 5, 0, 9])
    expected_memory = target_memory.clone()
    expected_memory[:, ids] = memory[:, ids]
    packed = poisoned_packed(ids.size, pool)
    with CpuCopy(num_threads, method) as backend:
        backend.gather(pool, ids, packed)
        backend.scatter(target, ids, packed)
    assert torch.equal(packed, gathered(pool, ids))
    assert torch.equal(target_memory, expected_memory)


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("method", [None, CpuMethod.RUNS, CpuMethod.SEGMENTS])
@pytest.mark.parametrize("name", ["gqa-bfloat16", "mla-scales", "uneven-words", "page-major-gap"])
def test_part_of_a_pool_moves_its_own_bytes_and_sums_them_at_their_place_in_the_page(
    name: str, method: CpuMethod | None, num_threads: int
) -> None:
    case = next(case for case in CASES if case.name == name)
    for first in range(len(case.typed)):
        pool, target, ids = build(case, "cpu")
        _, expected_target, _ = build(case, "cpu")
        part = pool.segments(first, min(2, len(case.typed) - first))
        packed, expected = poisoned_packed(ids.size, pool), poisoned_packed(ids.size, pool)
        sums = torch.full((ids.size,), -1)
        with CpuCopy(num_threads, method) as backend:
            backend.gather(part, ids, packed, checksums=sums)
            gather_naive(part, torch.from_numpy(ids), expected)
            assert torch.equal(packed, expected)
            assert torch.equal(sums, sums_of(gathered(part, ids)))
            target_part = target.segments(first, part.num_segments)
            backend.scatter(target_part, ids, packed, checksums=sums)
        scatter_naive(
            expected_target.segments(first, part.num_segments), torch.from_numpy(ids), packed
        )
        assert torch.equal(sums, sums_of(gathered(part, ids)))
        assert torch.equal(snapshot(case, target), snapshot(case, expected_target))


def test_sums_of_all_layers_add_up_to_the_sum_of_the_page(copy: CpuCopy) -> None:
    case = next(case for case in CASES if case.name == "uneven-words")
    pool, _, ids = build(case, "cpu")
    packed = poisoned_packed(ids.size, pool)
    total = torch.zeros(ids.size, dtype=torch.int64)
    for first in range(pool.num_segments):
        sums = torch.empty(ids.size, dtype=torch.int64)
        copy.gather(pool.segments(first, 1), ids, packed, checksums=sums)
        total += sums
    assert torch.equal(total, sums_of(packed))


def test_sums_of_long_pages_do_not_depend_on_how_they_are_cut(copy: CpuCopy) -> None:
    pool, _ = one_allocation(3, 4, 100_001)
    packed, sums = poisoned_packed(3, pool), torch.empty(3, dtype=torch.int64)
    copy.gather(pool, [3, 0, 2], packed, checksums=sums)
    assert torch.equal(sums, sums_of(packed))


def test_many_pages_are_copied_in_several_calls_without_a_seam(copy: CpuCopy) -> None:
    pool, memory = one_allocation(3, 20_000, 24)
    ids = np.random.default_rng(2).permutation(20_000)
    packed = poisoned_packed(ids.size, pool)
    copy.gather(pool, ids, packed)
    assert torch.equal(packed, gathered(pool, ids))
    before = memory.clone()
    memory.fill_(0xA5)
    copy.scatter(pool, ids, packed)
    assert torch.equal(memory, before)


def test_the_method_follows_rows_places_and_ids() -> None:
    scattered, adjacent = np.array([5, 0, 7, 3, 4]), np.arange(8)

    def chosen(pool: PagedPool, ids: npt.NDArray[np.int64], page_bytes: int) -> CpuMethod:
        packed = np.empty((ids.size, page_bytes), dtype=np.uint8)
        return choose(slabs_of(pool)[0], ids, packed)

    small, _ = one_allocation(4, 9, 1024)
    large, _ = one_allocation(4, 9, 1 << 16)
    single, _ = one_allocation(1, 9, 1 << 14)
    gaps = PagedPool.of([torch.empty((9, 1040), dtype=torch.uint8)[:, :1024] for _ in range(2)])
    assert chosen(small, scattered, 4096) is CpuMethod.FLAT
    assert chosen(large, scattered, 1 << 18) is CpuMethod.FLAT
    assert chosen(large.segments(0, 2), scattered, 1 << 18) is CpuMethod.RUNS
    assert chosen(single, scattered, 1 << 14) is CpuMethod.FLAT
    assert chosen(single, adjacent, 1 << 14) is CpuMethod.RUNS
    assert chosen(small.segments(0, 2), scattered, 4096) is CpuMethod.SEGMENTS
    assert chosen(small.segments(0, 2), adjacent, 4096) is CpuMethod.RUNS
    assert chosen(gaps, scattered, 2048) is CpuMethod.SEGMENTS


def test_packed_memory_between_the_segments_is_not_overwritten(copy: CpuCopy) -> None:
    memory = torch.from_numpy(position_pattern(3 * 8 * 64)).view(3, 8, 64)
    pool = PagedPool.of([memory[0], memory[2]])
    packed = memory[1].view(4, 128)
    expected = gathered(pool, np.array([1, 7, 0, 6]))
    outside = memory[[0, 2]]
    copy.gather(pool, [1, 7, 0, 6], packed)
    assert torch.equal(packed, expected)
    assert torch.equal(memory[[0, 2]], outside)


@pytest.mark.parametrize("method", METHODS)
def test_one_object_serves_several_threads(method: CpuMethod | None) -> None:
    pool, memory = one_allocation(4, 512, 1024)
    orders = [np.random.default_rng(seed).permutation(512) for seed in range(8)]
    with CpuCopy(2, method) as backend, ThreadPoolExecutor(4) as callers:

        def round_trip(ids: npt.NDArray[np.int64]) -> bool:
            target, target_memory = one_allocation(4, 512, 1024, seed=9)
            packed = poisoned_packed(ids.size, pool)
            sums = torch.empty(ids.size, dtype=torch.int64)
            backend.gather(pool, ids, packed, checksums=sums)
            backend.scatter(target, ids, packed)
            return torch.equal(target_memory, memory) and torch.equal(sums, sums_of(packed))

        assert list(callers.map(round_trip, orders)) == [True] * len(orders)


def test_scatter_to_one_page_twice_is_refused_with_nothing_written(copy: CpuCopy) -> None:
    source, target, _ = build(SEPARATE, "cpu")
    before = snapshot(SEPARATE, target)
    with pytest.raises(CopyError, match="page id 3 occurs twice"):
        copy.scatter(target, [3, 1, 3], gathered(source, np.array([3, 1, 3])))
    assert torch.equal(snapshot(SEPARATE, target), before)


@pytest.mark.parametrize(
    ("ids", "shape", "sums", "message"),
    [
        ([9], (1, 4096), None, "page id 9 at 0 is outside the pool of 9 pages"),
        ([-1], (1, 4096), None, "page id -1 at 0 is outside"),
        ([1, 2], (1, 4096), None, "packed is"),
        ([1], (1, 4095), None, "packed is"),
        ([], (1, 4096), None, "packed is"),
        ([1], (1, 4096), (2,), "checksums is"),
    ],
)
def test_what_does_not_fit_is_refused_with_nothing_written(
    copy: CpuCopy,
    ids: list[int],
    shape: tuple[int, int],
    sums: tuple[int, ...] | None,
    message: str,
) -> None:
    _, target, _ = build(SEPARATE, "cpu")
    before = snapshot(SEPARATE, target)
    packed = torch.full(shape, 0x5A, dtype=torch.uint8)
    checksums = None if sums is None else torch.zeros(sums, dtype=torch.int64)
    for call in (copy.gather, copy.scatter):
        with pytest.raises(CopyError, match=message):
            call(target, ids, packed, checksums=checksums)
    assert bool((packed == 0x5A).all())
    assert torch.equal(snapshot(SEPARATE, target), before)


def test_a_pool_on_another_device_is_refused(copy: CpuCopy) -> None:
    pool = PagedPool.of([torch.empty((4, 8), dtype=torch.uint8, device="meta")])
    with pytest.raises(CopyError, match="the pool is on meta"):
        copy.gather(pool, [0], torch.empty((1, 8), dtype=torch.uint8, device="meta"))


def test_no_copy_after_close() -> None:
    pool, _ = one_allocation(1, 2, 8)
    backend = CpuCopy()
    backend.close()
    with pytest.raises(CopyError, match="closed"):
        backend.gather(pool, [0], poisoned_packed(1, pool))


@st.composite
def pools(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    num_pages = draw(st.integers(1, 12))
    return Case(
        "drawn",
        torch.uint8,
        tuple((row,) for row in rows),
        num_pages,
        tuple(draw(st.lists(st.integers(0, num_pages - 1), max_size=16))),
        page_major=draw(st.booleans()),
        gap_bytes=draw(st.integers(0, 9)),
        lead_bytes=draw(st.integers(0, 9)),
    )


@given(case=pools(), method=st.sampled_from((None, CpuMethod.RUNS, CpuMethod.SEGMENTS)))
def test_any_pool_survives_a_round_trip(case: Case, method: CpuMethod | None) -> None:
    source, target, ids = build(case, "cpu")
    _, expected, _ = build(case, "cpu")
    unique = np.asarray(case.unique_ids, dtype=np.int64)
    packed = poisoned_packed(ids.size, source)
    sums = torch.full((ids.size,), -1)
    with CpuCopy(2, method) as backend:
        backend.gather(source, ids, packed, checksums=sums)
        backend.scatter(target, unique, gathered(source, unique))
    scatter_naive(expected, torch.from_numpy(unique), gathered(source, unique))
    assert torch.equal(packed, gathered(source, ids))
    assert torch.equal(sums, sums_of(packed))
    assert torch.equal(snapshot(case, target), snapshot(case, expected))
