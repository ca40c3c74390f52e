"""How much host memory a pool may take, from files of real and made-up machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CapacityError, PoolError
from kvtier.memory.limits import RESERVE_BYTES, HostRoom, MemoryLimit

from .machine import GIB, Machine

V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


def room_of(free: int, limit: int = 512 * GIB) -> HostRoom:
    return HostRoom((MemoryLimit("RAM", limit, free),))


def test_ram_is_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ram=512 * GIB, available=300 * GIB)
    assert HostRoom.read(machine.root).limits == (MemoryLimit("RAM", 512 * GIB, 300 * GIB),)


def test_a_container_below_the_machine_counts_every_rank_b16(tmp_path: Path) -> None:
    """B16: 8 ranks, a container of 64 GiB on a machine of 512 GiB."""
    machine = Machine(tmp_path, ram=512 * GIB)
    machine.mount_v2("/")
    machine.limit_v2(V2, maximum=64 * GIB, used=4 * GIB)
    room = HostRoom.read(machine.root)
    page = 1 << 20
    room.check(6 * 1024, page, num_ranks=8, reserve_bytes=10 * GIB)
    with pytest.raises(CapacityError, match=r"8 ranks \(.*in all\).*cgroup /,"):
        room.check(8 * 1024, page, num_ranks=8, reserve_bytes=10 * GIB)


@pytest.mark.parametrize("smallest", ["pods", "pods/pod7", "pods/pod7/engine"])
def test_the_smallest_of_nested_cgroups_binds(tmp_path: Path, smallest: str) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2("/pods/pod7/engine")
    for folder in ("pods", "pods/pod7", "pods/pod7/engine"):
        maximum = 40 * GIB if folder == smallest else 80 * GIB
        machine.limit_v2(f"{V2}/{folder}", maximum=maximum, used=10 * GIB)
    room = HostRoom.read(machine.root)
    assert len(room.limits) == 4
    assert room.tightest == MemoryLimit(f"cgroup /{smallest}", 40 * GIB, 30 * GIB)


def test_a_sibling_that_fills_the_parent_binds_before_the_own_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2("/pod/engine")
    machine.limit_v2(f"{V2}/pod/engine", maximum=50 * GIB, used=1 * GIB)
    machine.limit_v2(f"{V2}/pod", maximum=100 * GIB, used=90 * GIB)
    assert HostRoom.read(machine.root).tightest == MemoryLimit("cgroup /pod", 100 * GIB, 10 * GIB)


def test_clean_files_of_a_cgroup_count_as_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2("/")
    machine.limit_v2(V2, maximum=64 * GIB, used=60 * GIB, files=50 * GIB)
    assert HostRoom.read(machine.root).tightest.free_bytes == 54 * GIB


def test_memory_high_binds_like_a_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2("/")
    machine.limit_v2(V2, maximum="max", high=32 * GIB, used=2 * GIB)
    assert HostRoom.read(machine.root).tightest == MemoryLimit("cgroup /", 32 * GIB, 30 * GIB)


def test_version_1_counts_the_groups_below(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v1("/docker/77")
    machine.limit_v1(f"{V1}/docker/77", maximum=64 * GIB, used=20 * GIB, files=6 * GIB)
    machine.limit_v1(f"{V1}/docker", maximum=9223372036854771712, used=20 * GIB)
    machine.limit_v1(V1, maximum=9223372036854771712, used=40 * GIB)
    room = HostRoom.read(machine.root)
    assert room.limits[1:] == (MemoryLimit("cgroup /docker/77", 64 * GIB, 50 * GIB),)


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v1("/job")
    machine.mount_v2("/", at="/sys/fs/cgroup/unified")
    machine.limit_v1(f"{V1}/job", maximum=64 * GIB, used=0)
    assert HostRoom.read(machine.root).tightest.limit_bytes == 64 * GIB


@pytest.mark.parametrize("own", ["/docker/77", "/../elsewhere", "/system.slice"])
def test_a_container_that_sees_its_own_cgroup_alone(tmp_path: Path, own: str) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2(own, mount_root="/docker/77")
    machine.limit_v2(V2, maximum=64 * GIB, used=0)
    assert HostRoom.read(machine.root).tightest.limit_bytes == 64 * GIB


def test_no_bound_anywhere_leaves_ram(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2("/engine")
    machine.limit_v2(f"{V2}/engine", maximum="max", used=3 * GIB)
    assert [limit.name for limit in HostRoom.read(machine.root).limits] == ["RAM"]


def test_a_system_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="meminfo does not tell"):
        HostRoom.read(tmp_path)


def test_the_system_that_runs_this_can_be_read() -> None:
    room = HostRoom.read()
    assert room.limits[0].name == "RAM"
    assert 0 < room.limits[0].free_bytes <= room.limits[0].limit_bytes


def test_the_message_counts_the_reserve_and_says_what_would_fit_b17() -> None:
    """B17: "Requesting 40.00 GB but only have 44.87 GB free." """
    room = room_of(44_870_000_000, limit=64_000_000_000)
    with pytest.raises(CapacityError) as error:
        room.check(20_000, 2_000_000, reserve_bytes=10_000_000_000)
    assert str(error.value) == (
        "the host pool asks for 20,000 pages, 40.00 GB, but 44.87 GB are free (RAM, 64.00 GB), of "
        "which 10.00 GB stay in reserve; 17,435 pages, 34.87 GB, would fit"
    )


def test_where_no_page_fits_the_message_says_so() -> None:
    with pytest.raises(CapacityError, match=r"not one page of 2\.00 MB on each of 4 ranks"):
        room_of(9 * GIB).check(1, 2_000_000, num_ranks=4, reserve_bytes=10 * GIB)


def test_a_limit_that_is_exceeded_shows_by_how_much() -> None:
    with pytest.raises(CapacityError, match=r"but -2\.00 GB are free"):
        room_of(-2_000_000_000).check(1, 4096)


def test_the_default_reserve_is_a_tenth_of_a_small_machine() -> None:
    assert room_of(GIB, limit=20 * GIB).default_reserve_bytes == 2 * GIB
    assert room_of(GIB, limit=512 * GIB).default_reserve_bytes == RESERVE_BYTES
    room_of(18 * GIB, limit=20 * GIB).check(16, GIB)
    with pytest.raises(CapacityError):
        room_of(18 * GIB, limit=20 * GIB).check(17, GIB)


@given(
    free=st.integers(-GIB, 2000 * GIB),
    page_bytes=st.integers(1, 1 << 24),
    num_ranks=st.integers(1, 16),
    reserve=st.integers(0, 20 * GIB),
)
def test_exactly_what_would_fit_is_let_through(
    free: int, page_bytes: int, num_ranks: int, reserve: int
) -> None:
    room = room_of(free)
    fits = room.num_pages_that_fit(page_bytes, num_ranks=num_ranks, reserve_bytes=reserve)
    room.check(fits, page_bytes, num_ranks=num_ranks, reserve_bytes=reserve)
    assert fits * page_bytes * num_ranks <= max(0, free - reserve)
    with pytest.raises(CapacityError) as error:
        room.check(fits + 1, page_bytes, num_ranks=num_ranks, reserve_bytes=reserve)
    text = str(error.value)
    assert "\n" not in text
    offer = re.search(r"; ([\d,]+) pages", text)
    assert fits == (int(offer[1].replace(",", "")) if offer else 0)


@pytest.mark.parametrize(
    "wrong", [{"num_ranks": 0}, {"reserve_bytes": -1}, {"page_bytes": 0}], ids=str
)
def test_nonsense_is_refused_in_one_line(wrong: dict[str, int]) -> None:
    values = {"num_pages": 1, "page_bytes": 4096, **wrong}
    (name,) = wrong
    with pytest.raises(PoolError, match=rf"{name}=.*pass \d or more"):
        room_of(GIB).check(**values)
