"""Host memory of an exact size: resident, on huge pages, touched where it is to lie."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from kvtier.errors import CapacityError, PoolError
from kvtier.memory.mapping import HUGE_PAGE_BYTES, Mapping
from kvtier.memory.numa import Placement

from .resident import MIB, flags_at, resident_bytes

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs transparent huge pages"
)


@pytest.mark.parametrize(
    "num_bytes", [1, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 40 * MIB + 12_345]
)
def test_touched_memory_is_resident_and_no_larger_than_asked(num_bytes: int) -> None:
    mapping = Mapping(num_bytes)
    before = resident_bytes()
    mapping.touch(num_threads=1)
    grown = resident_bytes() - before
    # A few objects of the interpreter's own come and go.
    assert num_bytes - MIB // 4 <= grown <= num_bytes + MIB // 4
    assert mapping.memory.shape == (num_bytes,)
    assert not mapping.memory.any()


def test_memory_is_given_back_when_closed() -> None:
    mapping = Mapping(32 * MIB)
    mapping.touch()
    before = resident_bytes()
    mapping.close()
    mapping.close()
    assert before - resident_bytes() > 31 * MIB


def test_a_view_outlives_the_mapping_and_keeps_its_bytes() -> None:
    mapping = Mapping(3 * MIB)
    view = mapping.memory[-5:]
    view[:] = 7
    mapping.close()
    assert view.tolist() == [7] * 5


def test_a_closed_mapping_says_so() -> None:
    mapping = Mapping(4096)
    mapping.close()
    with pytest.raises(PoolError, match="closed"):
        _ = mapping.memory
    with pytest.raises(PoolError, match="closed"):
        _ = mapping.address
    with pytest.raises(PoolError, match="closed"):
        mapping.touch()
    with pytest.raises(PoolError, match="closed"):
        mapping.keep_from_children()


@needs_huge_pages
def test_large_mappings_begin_at_a_border_of_huge_pages_and_ask_for_them() -> None:
    mapping = Mapping(4 * MIB + 100)
    assert mapping.address % HUGE_PAGE_BYTES == 0
    assert "hg" in flags_at(mapping.address)
    assert "hg" in flags_at(mapping.address + 4 * MIB - 1)
    # A huge page at the end would be resident beyond the size.
    assert "hg" not in flags_at(mapping.address + 4 * MIB)


def test_a_kernel_without_huge_pages_leaves_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)
    mapping = Mapping(4 * MIB)
    assert "event=host_pool_without_huge_pages" in caplog.text
    mapping.touch()


def test_every_thread_touches_on_the_cpus_of_the_node_and_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.sched_getaffinity(0)
    near = Placement(0, frozenset({min(before)}))
    bound: dict[int, list[set[int]]] = defaultdict(list)
    touching = threading.Barrier(2, timeout=30)
    bind = os.sched_setaffinity

    def recording(pid: int, cpus: set[int]) -> None:
        mine = bound[threading.get_ident()]
        bind(pid, cpus)
        mine.append(set(os.sched_getaffinity(pid)))
        if len(mine) == 1:
            touching.wait()  # so that either thread has a part

    monkeypatch.setattr(os, "sched_setaffinity", recording)
    Mapping(200 * MIB).touch(near, num_threads=2)
    assert len(bound) == 2
    for states in bound.values():
        assert states == [set(near.cpus), before] * (len(states) // 2)
    assert sum(len(states) for states in bound.values()) == 2 * 4
    assert os.sched_getaffinity(0) == before


def test_cpus_that_cannot_be_had_are_an_error_that_names_them() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(PoolError, match=r"no thread may run on CPUs 100000 of node 3"):
        Mapping(4096).touch(Placement(3, frozenset({100_000})))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_address_space_that_is_not_there_is_refused(num_bytes: int) -> None:
    with pytest.raises(CapacityError, match="the system refuses") as error:
        Mapping(num_bytes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_bytes", [0, -4096])
def test_no_bytes_are_no_mapping(num_bytes: int) -> None:
    with pytest.raises(PoolError, match="1 or more"):
        Mapping(num_bytes)


def test_memory_kept_from_children_is_left_out_of_forks() -> None:
    mapping = Mapping(4 * MIB)
    assert "dc" not in flags_at(mapping.address)
    mapping.keep_from_children()
    assert "dc" in flags_at(mapping.address)
