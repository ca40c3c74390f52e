"""NUMA nodes as data, and the node that a host pool should lie on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import PoolError

_LOG = logging.getLogger(__name__)
_NODE = re.compile(r"node(\d+)")
_PCI_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node: its CPUs, none for bare memory, and whether it has memory that we may use."""

    node_id: int
    cpus: frozenset[int]
    has_memory: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Where memory is to lie: what a thread on `cpus` touches first lands on its node.

    `node_id` is None where no node was chosen; empty `cpus` leave threads where they are.
    """

    node_id: int | None = None
    cpus: frozenset[int] = frozenset()


ANYWHERE = Placement()


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a machine, and the CPUs that this process may run on."""

    nodes: tuple[NumaNode, ...]
    usable_cpus: frozenset[int]

    @classmethod
    def read(cls, root: Path = Path("/"), usable_cpus: Iterable[int] | None = None) -> Topology:
        """The nodes below `root`/sys that this process may take memory from; none without NUMA.

        `usable_cpus` are those of the calling thread if not given.
        """
        usable = os.sched_getaffinity(0) if usable_cpus is None else usable_cpus
        folder = root / "sys/devices/system/node"
        found = [(int(match[1]), path) for path in folder.glob("node*") if (match := _match(path))]
        with_memory = _memory_nodes(root, folder)
        nodes = [
            NumaNode(node_id, parse_list((path / "cpulist").read_text()), node_id in with_memory)
            for node_id, path in sorted(found)
        ]
        return cls(tuple(nodes), frozenset(usable))

    def near(self, node_id: int | None, device: str) -> Placement:
        """The placement on node `node_id`, that of `device`.

        On a machine of one node, that node. Where the node cannot be had, ANYWHERE, and a warning
        that says why: the pool still works, at the speed of the link between sockets.
        """
        if len(self.nodes) < 2:
            only = self.nodes[0].node_id if self.nodes else None
            return Placement(only, self.usable_cpus)
        node = next((node for node in self.nodes if node.node_id == node_id), None)
        reason = self._obstacle(node, node_id)
        if node is None or reason:
            _LOG.warning(
                "event=host_pool_placed_anywhere device=%s node=%s reason=%r",
                device,
                node_id,
                reason,
            )
            return ANYWHERE
        return Placement(node.node_id, node.cpus & self.usable_cpus)

    def _obstacle(self, node: NumaNode | None, node_id: int | None) -> str:
        if node_id is None:
            return "the system names no node for the device"
        if node is None:
            return f"the nodes here are {list_text(node.node_id for node in self.nodes)}"
        if not node.has_memory:
            return "the node has no memory that this process may use (cpuset.mems)"
        if not node.cpus & self.usable_cpus:
            return (
                f"this process runs on CPUs {list_text(self.usable_cpus)} alone, the node has "
                f"{list_text(node.cpus) or 'none'}"
            )
        return ""


def pci_node(address: str, root: Path = Path("/")) -> int | None:
    """The node of the PCI device at `address` ("0000:1b:00.0"); None where the system names none.

    Domains of eight digits, as NVML writes them, are fine. Raises PoolError for another form.
    """
    match = _PCI_ADDRESS.fullmatch(address)
    if match is None:
        raise PoolError(f"PCI address {address!r}; pass domain:bus:device.function, 0000:1b:00.0")
    domain, bus, device, function = match.groups()
    name = f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()
    try:
        node_id = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except FileNotFoundError:
        return None
    return node_id if node_id >= 0 else None


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as "0-3,8"; none for an empty one."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def list_text(numbers: Iterable[int]) -> str:
    """The inverse of `parse_list`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _match(path: Path) -> re.Match[str] | None:
    return _NODE.fullmatch(path.name)


def _memory_nodes(root: Path, folder: Path) -> frozenset[int]:
    """Nodes that have memory and that the process's cpuset allows."""
    status = (root / "proc/self/status").read_text()
    allowed = re.search(r"^Mems_allowed_list:\s*(\S*)$", status, re.MULTILINE)
    try:
        present = parse_list((folder / "has_memory").read_text())
    except FileNotFoundError:
        present = frozenset()  # no NUMA, no nodes
    return present & parse_list(allowed[1]) if allowed else present
