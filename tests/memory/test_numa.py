"""Topologies given as data: the pool follows its device's node, or a log line says why not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import PoolError
from kvtier.memory.numa import ANYWHERE, Placement, Topology, list_text, parse_list, pci_node

from .machine import Machine

ALL = range(16)
TWO_NODES = {0: "0-3,8-11", 1: "4-7,12-15"}


def two_nodes(root: Path, **options: str) -> Machine:
    machine = Machine(root)
    machine.nodes(TWO_NODES, **{"has_memory": "0-1", **options})
    return machine


@pytest.mark.parametrize("node", [0, 1])
def test_placement_follows_the_node_of_the_device_b37(
    tmp_path: Path, node: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine = two_nodes(tmp_path)
    machine.device("0000:1b:00.0", node)
    topology = Topology.read(machine.root, ALL)
    placement = topology.near(pci_node("00000000:1B:00.0", machine.root), "cuda:0")
    assert placement == Placement(node, parse_list(TWO_NODES[node]))
    assert caplog.records == []


def test_threads_stay_on_the_cpus_that_the_process_may_use(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path).root, {2, 3, 4})
    assert topology.near(0, "cuda:0") == Placement(0, frozenset({2, 3}))


@pytest.mark.parametrize(
    ("options", "usable", "node", "reason"),
    [
        ({}, ALL, None, "the system names no node for the device"),
        ({}, ALL, 4, "the nodes here are 0-1"),
        ({}, {0, 1, 2, 3}, 1, "this process runs on CPUs 0-3 alone, the node has 4-7,12-15"),
        ({"has_memory": "0"}, ALL, 1, "no memory that this process may use"),
        ({"allowed": "0"}, ALL, 1, "no memory that this process may use"),
    ],
)
def test_a_node_that_cannot_be_had_falls_back_with_a_log_line_b37(
    tmp_path: Path,
    options: dict[str, str],
    usable: set[int],
    node: int | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topology = Topology.read(two_nodes(tmp_path, **options).root, usable)
    assert topology.near(node, "cuda:3") == ANYWHERE
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        f"event=host_pool_placed_anywhere device=cuda:3 node={node} reason="
    )
    assert reason in record.getMessage()


def test_a_node_of_bare_memory_is_no_place_for_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.nodes({0: "0-7", 1: "8-15", 2: ""}, has_memory="0-2")
    assert Topology.read(machine.root, ALL).near(2, "cuda:0") == ANYWHERE
    assert "the node has none" in caplog.text


@pytest.mark.parametrize("node", [None, 0, 7])
def test_one_node_needs_no_choice(
    tmp_path: Path, node: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.nodes({0: "0-15"}, has_memory="0")
    assert Topology.read(machine.root, {1, 2}).near(node, "cuda:0") == Placement(
        0, frozenset({1, 2})
    )
    assert caplog.records == []


def test_a_kernel_without_numa_places_on_the_usable_cpus(tmp_path: Path) -> None:
    topology = Topology.read(Machine(tmp_path).root, {1, 2})
    assert topology.nodes == ()
    assert topology.near(None, "cuda:0") == Placement(None, frozenset({1, 2}))


def test_the_machine_that_runs_this_can_be_read() -> None:
    topology = Topology.read()
    on_nodes = frozenset().union(*(node.cpus for node in topology.nodes))
    assert topology.usable_cpus <= on_nodes or topology.nodes == ()


@pytest.mark.parametrize("node", [-1, None])
def test_a_device_without_a_node_has_none(tmp_path: Path, node: int | None) -> None:
    machine = Machine(tmp_path)
    if node is not None:
        machine.device("0000:1b:00.0", node)
    assert pci_node("0000:1b:00.0", machine.root) is None


@pytest.mark.parametrize("address", ["", "1b:00.0", "0000:1b:00.9", "../../etc", "cuda:0"])
def test_what_is_no_pci_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(PoolError, match="pass domain:bus:device"):
        pci_node(address, tmp_path)


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_the_kernel_survive_both_ways(numbers: frozenset[int]) -> None:
    assert parse_list(f"{list_text(numbers)}\n") == numbers
