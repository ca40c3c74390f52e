"""A machine as files: what /proc and /sys say of its memory, nodes and devices."""

from pathlib import Path

GIB = 1 << 30


class Machine:
    """Writes the files below `root`; RAM at first, cgroups and nodes as asked."""

    def __init__(self, root: Path, *, ram: int = 512 * GIB, available: int | None = None) -> None:
        self.root = root
        free = ram if available is None else available
        meminfo = f"MemTotal: {ram // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"
        self.write("proc/meminfo", meminfo)
        self.write("proc/self/status", "Name:\tpython\n")
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def add(self, path: str, text: str) -> None:
        self.write(path, (self.root / path).read_text() + text)

    def mount_v2(self, own: str, *, mount_root: str = "/", at: str = "/sys/fs/cgroup") -> None:
        """The process is in cgroup `own` of version 2."""
        self.add("proc/self/cgroup", f"0::{own}\n")
        options = "rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
        self.add("proc/self/mountinfo", f"30 22 0:26 {mount_root} {at} {options}\n")

    def mount_v1(self, own: str, *, mount_root: str = "/") -> None:
        """The process is in cgroup `own` of version 1's memory controller."""
        self.add("proc/self/cgroup", f"5:cpu,cpuacct:/elsewhere\n4:memory:{own}\n")
        mounts = (
            f"31 22 0:31 {mount_root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"32 22 0:32 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        )
        self.add("proc/self/mountinfo", mounts)

    def limit_v2(
        self, folder: str, *, maximum: int | str, used: int, files: int = 0, high: int | str = "max"
    ) -> None:
        self.write(f"{folder}/memory.max", f"{maximum}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\nactive_file 0\ninactive_file {files}\n")

    def limit_v1(self, folder: str, *, maximum: int, used: int, files: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{maximum}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        # The figures without total_ leave the groups below out.
        stat = f"inactive_file 7\ntotal_inactive_file {files}\ntotal_active_file 0\n"
        self.write(f"{folder}/memory.stat", stat)

    def nodes(self, cpus: dict[int, str], *, has_memory: str, allowed: str | None = None) -> None:
        """NUMA nodes with their CPUs; those with memory, and those that the cpuset allows."""
        for node_id, cpulist in cpus.items():
            self.write(f"sys/devices/system/node/node{node_id}/cpulist", f"{cpulist}\n")
        self.write("sys/devices/system/node/has_memory", f"{has_memory}\n")
        if allowed is not None:
            self.add("proc/self/status", f"Mems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")

    def device(self, address: str, node: int) -> None:
        self.write(f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
