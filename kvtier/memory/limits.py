"""How much host memory a pool may take: RAM and cgroups, less a reserve, shared by all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvtier.errors import CapacityError, PoolError
from kvtier.memory.sizes import at_least, at_most

RESERVE_BYTES = 10 << 30
"""Most of what stays free by default: for the engine, its buffers and the page cache; SGLang's."""
_RESERVE_SHARE = 10  # by default, at most one part in ten of a machine's or container's memory
_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound: `free_bytes` of its `limit_bytes` can be had; below 0 where it is exceeded.

    What the kernel can take back at once, clean files for one, counts as free.
    """

    name: str
    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The bounds on this process's memory at one moment; plain data, so that ranks can share it.

    Ranks that start together must judge by a reading from before any of them allocates: a later
    one counts a sibling's pool twice, as used and as asked for.
    """

    limits: tuple[MemoryLimit, ...]

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostRoom:
        """RAM and every cgroup, v1 or v2, from this process's own to the topmost that is visible.

        Raises PoolError where `root`/proc does not tell how much memory is available.
        """
        return cls((_ram(root), *_cgroups(root)))

    @property
    def tightest(self) -> MemoryLimit:
        """The bound with the least free memory."""
        return min(self.limits, key=lambda limit: limit.free_bytes)

    @property
    def default_reserve_bytes(self) -> int:
        """RESERVE_BYTES, or a tenth of the smallest limit where that is less."""
        smallest = min(limit.limit_bytes for limit in self.limits)
        return min(RESERVE_BYTES, smallest // _RESERVE_SHARE)

    def num_pages_that_fit(
        self, page_bytes: int, *, num_ranks: int = 1, reserve_bytes: int | None = None
    ) -> int:
        """Pages that each of `num_ranks` ranks can have beside the reserve; 0 or more."""
        if num_ranks < 1 or page_bytes < 1:
            raise PoolError(f"num_ranks={num_ranks}, page_bytes={page_bytes}; pass 1 or more")
        reserve = self._reserve(reserve_bytes)
        return max(0, self.tightest.free_bytes - reserve) // (page_bytes * num_ranks)

    def check(
        self,
        num_pages: int,
        page_bytes: int,
        *,
        num_ranks: int = 1,
        reserve_bytes: int | None = None,
    ) -> None:
        """Raise CapacityError unless each of `num_ranks` ranks can have `num_pages` pages.

        `num_ranks` are the processes of the same start on this machine, this one included.
        `reserve_bytes` stay free beside them all; `default_reserve_bytes` if not given.
        """
        reserve = self._reserve(reserve_bytes)
        fits = self.num_pages_that_fit(page_bytes, num_ranks=num_ranks, reserve_bytes=reserve)
        if num_pages > fits:
            raise CapacityError(self._refusal(num_pages, page_bytes, num_ranks, reserve, fits))

    def _reserve(self, given: int | None) -> int:
        if given is not None and given < 0:
            raise PoolError(f"reserve_bytes={given}; pass 0 or more")
        return self.default_reserve_bytes if given is None else given

    def _refusal(
        self, num_pages: int, page_bytes: int, num_ranks: int, reserve: int, fits: int
    ) -> str:
        asked, limit = num_pages * page_bytes, self.tightest
        all_ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        total = f" ({at_least(asked * num_ranks)} in all)" if num_ranks > 1 else ""
        way_out = (
            f"{fits:,} pages, {at_most(fits * page_bytes)}{all_ranks}, would fit"
            if fits
            else f"not one page of {at_least(page_bytes)}{all_ranks} would fit: free memory, or "
            "keep a smaller reserve"
        )
        return (
            f"the host pool asks for {num_pages:,} pages, {at_least(asked)}{all_ranks}{total}, but "
            f"{at_most(limit.free_bytes)} are free ({limit.name}, {at_most(limit.limit_bytes)}), "
            f"of which {at_least(reserve)} stay in reserve; {way_out}"
        )


def _ram(root: Path) -> MemoryLimit:
    path = root / "proc/meminfo"
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", text, re.MULTILINE))
    if len(found) < 2:
        raise PoolError(f"{path} does not tell how much memory is available; kvtier needs Linux")
    return MemoryLimit("RAM", int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024)


@dataclass(frozen=True, slots=True)
class _Version:
    """Where one version of cgroups keeps its figures."""

    bounds: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


# memory.high does not refuse memory, but stalls whoever exceeds it: a pool that does is no use.
_V2 = _Version(
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)
_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    own = dict(_own_cgroups(root))
    for version, mount_root, mount_point in _cgroup_mounts(root):
        if version not in own:
            continue
        path = PurePosixPath(own[version])
        # Outside what is mounted here, the mount point is all that can be seen of it.
        visible = path.is_relative_to(mount_root) and ".." not in path.parts
        inside = path.relative_to(mount_root) if visible else PurePosixPath()
        for part in (inside, *inside.parents):
            limit = _cgroup_limit(version, root / mount_point.lstrip("/") / part, _name(part))
            if limit is not None:
                yield limit


def _own_cgroups(root: Path) -> Iterator[tuple[_Version, str]]:
    """The process's cgroup in each hierarchy that may bound memory."""
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _cgroup_mounts(root: Path) -> Iterator[tuple[_Version, str, str]]:
    """Of each mounted hierarchy: its version, which cgroup is mounted, and where."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        mount_root, mount_point = mount.split()[3:5]
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            yield _V2, mount_root, mount_point
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _V1, mount_root, mount_point


def _cgroup_limit(version: _Version, folder: Path, name: str) -> MemoryLimit | None:
    bounds = [bound for file in version.bounds if (bound := _bound(folder / file)) is not None]
    if not bounds:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
    reclaimable = sum(int(stat.get(key, 0)) for key in version.reclaimable)
    used = int((folder / version.used).read_text())
    limit = min(bounds)
    return MemoryLimit(name, limit, limit - used + reclaimable)


def _name(cgroup: PurePosixPath) -> str:
    return "cgroup /" + "/".join(cgroup.parts)


def _bound(path: Path) -> int | None:
    """The bound in a file; None where there is no such file, or no bound."""
    text = "".join(_lines(path)).strip()
    if text in ("", "max"):
        return None
    bound = int(text)
    return bound if bound < _NO_LIMIT else None


def _lines(path: Path) -> list[str]:
    """The lines of a file that older or leaner systems lack."""
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
