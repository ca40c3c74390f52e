"""The host tier: checked, mapped, touched, registered; all of it or nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvtier.errors import CapacityError, PoolError
from kvtier.kernels.cpu import CpuCopy
from kvtier.layout import load_model
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.host_pool import HostPool
from kvtier.memory.limits import HostRoom, MemoryLimit
from kvtier.memory.mapping import Mapping
from kvtier.memory.numa import Placement
from kvtier.memory.registration import Pinning

from .registrars import FakeRegistrar
from .resident import MIB, flags_at, resident_bytes

PAGE = 20_480
ROOM = HostRoom((MemoryLimit("RAM", 1000 * MIB, 600 * MIB),))


def test_the_pool_is_as_large_as_asked_and_no_power_of_two() -> None:
    """37 MiB; an allocator that rounds up would take 64."""
    num_pages = 37 * MIB // PAGE
    before = resident_bytes()
    with HostPool.allocate(num_pages, PAGE, room=ROOM) as pool:
        grown = resident_bytes() - before
        assert pool.num_bytes == pool.packed.nbytes == num_pages * PAGE
        assert abs(grown - pool.num_bytes) < MIB
    assert resident_bytes() - before < MIB


def test_packed_is_one_contiguous_row_per_page_all_of_them_free() -> None:
    with HostPool.allocate(7, PAGE + 1) as pool:
        assert pool.packed.dtype == torch.uint8
        assert tuple(pool.packed.shape) == (7, PAGE + 1)
        assert pool.packed.is_contiguous()
        assert pool.pages.num_free == pool.num_pages == 7
        assert not pool.packed.any()
        assert pool.chunk_pages is None


def test_pages_come_back_from_the_host_as_they_went() -> None:
    layout = load_model("Qwen2.5-7B").layout()
    device = DevicePool.allocate(layout, 12, page_size=16)
    for tensor in device.pool.tensors:
        tensor.random_(0, 256)
    before = [tensor.clone() for tensor in device.pool.tensors]
    with HostPool.allocate(5, device.page_bytes) as host, CpuCopy(num_threads=1) as copy:
        rows = host.pages.take(3)
        assert rows is not None
        assert rows.tolist() == [0, 1, 2]
        copy.gather(device.pool, [9, 4, 6], host.packed[:3])
        for tensor in device.pool.tensors:
            tensor.zero_()
        copy.scatter(device.pool, [9, 4, 6], host.packed[:3])
        assert not host.packed[3:].any()
    for was, is_now in zip(before, device.pool.tensors, strict=True):
        kept = torch.zeros_like(was)
        kept[[9, 4, 6]] = was[[9, 4, 6]]
        assert kept.equal(is_now)


def test_limits_are_checked_before_any_memory_is_taken() -> None:
    before = resident_bytes()
    with pytest.raises(CapacityError, match=r"300\.02 MB on each of 2 ranks .* would fit"):
        HostPool.allocate(14_649, PAGE, room=ROOM, num_ranks=2)
    with pytest.raises(CapacityError, match=r"300\.02 MB, .* 500\.00 MB stay in reserve"):
        HostPool.allocate(14_649, PAGE, room=ROOM, reserve_bytes=500_000_000)
    assert resident_bytes() - before < MIB


def test_more_than_this_machine_has_is_refused_with_what_would_fit() -> None:
    room = HostRoom.read()
    num_pages = room.tightest.free_bytes // PAGE
    with pytest.raises(CapacityError, match=r"stay in reserve; [\d,]+ pages, .* would fit"):
        HostPool.allocate(num_pages, PAGE)


def test_pages_are_registered_in_whole_chunks_and_left_out_of_forks() -> None:
    registrar = FakeRegistrar()
    progress: list[int] = []
    pinning = Pinning(registrar, 4 * PAGE - 1, lambda done, total: progress.append(done))
    with HostPool.allocate(8, PAGE, pinning=pinning) as pool:
        base = pool.packed.data_ptr()
        assert pool.chunk_pages == 3
        assert registrar.live == {
            base: 3 * PAGE,
            base + 3 * PAGE: 3 * PAGE,
            base + 6 * PAGE: 2 * PAGE,
        }
        assert "dc" in flags_at(base)
    assert progress == [3 * PAGE, 6 * PAGE, 8 * PAGE]
    assert registrar.live == {}


def test_a_failed_registration_leaves_no_memory_behind_b29() -> None:
    registrar = FakeRegistrar(fail_register=frozenset({2}))
    before = resident_bytes()
    # Whoever keeps the error keeps its traceback, but no memory of the pool.
    with pytest.raises(PoolError, match="rolled back") as _error:
        HostPool.allocate(40 * MIB // PAGE, PAGE, pinning=Pinning(registrar, 10 * MIB))
    assert len(registrar.calls) == 3
    assert registrar.live == {}
    assert resident_bytes() - before < MIB


def test_a_chunk_that_stays_pinned_is_told_of_and_the_pool_is_closed_even_so() -> None:
    registrar = FakeRegistrar(fail_unregister=frozenset({0}))
    pool = HostPool.allocate(2, PAGE, pinning=Pinning(registrar))
    with pytest.raises(PoolError, match="1 of 1 chunks"):
        pool.close()
    with pytest.raises(PoolError, match="closed"):
        _ = pool.packed
    pool.close()


def test_a_view_that_somebody_keeps_outlives_the_pool() -> None:
    with HostPool.allocate(4, PAGE) as pool:
        page = pool.packed[3]
        page.fill_(9)
    assert page.eq(9).all()
    with pytest.raises(PoolError, match="this host pool is closed"):
        _ = pool.packed


def test_the_pool_is_touched_near_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = frozenset({min(os.sched_getaffinity(0))})
    bound: list[frozenset[int]] = []
    bind = os.sched_setaffinity

    def recording(pid: int, wanted: frozenset[int]) -> None:
        bound.append(frozenset(wanted))
        bind(pid, wanted)

    monkeypatch.setattr(os, "sched_setaffinity", recording)
    with HostPool.allocate(4, PAGE, near=Placement(0, cpus)):
        assert bound[0] == cpus


@pytest.mark.parametrize(("num_pages", "page_bytes"), [(0, PAGE), (-1, PAGE), (4, 0)])
def test_sizes_below_one_are_refused(num_pages: int, page_bytes: int) -> None:
    with pytest.raises(PoolError, match=f"num_pages={num_pages}, page_bytes={page_bytes}; pass 1"):
        HostPool.allocate(num_pages, page_bytes)


def test_memory_of_another_size_makes_no_pool() -> None:
    with pytest.raises(PoolError, match="4097 bytes are not 2 pages of 2048 bytes"):
        HostPool(Mapping(4097), 2, 2048)


def test_the_allocator_counts_what_a_pool_holds() -> None:
    with HostPool.allocate(6, PAGE) as pool:
        held = pool.pages.take(4)
        assert held is not None
        assert pool.pages.take(3) is None
        pool.packed.numpy()[held] = np.arange(4, dtype=np.uint8)[:, None]
        assert pool.packed[:, 0].tolist() == [0, 1, 2, 3, 0, 0]
        pool.pages.give(held)
        assert pool.pages.num_free == 6
