"""Where a program's pages are, and how full the pools are, read off the tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from kvtier.integration.sglang.control.protocol import Levels, Residency, TierLevel
from kvtier.tree.holders import Node, num_holders
from kvtier.tree.programs import Program


def held_nodes(program: Program) -> dict[Node, bool]:
    """The nodes that the program holds, each before its parent; True where nobody else does."""
    times: dict[Node, int] = {}
    for anchor in program.anchors():
        node = anchor.node
        while node is not None and node.parent is not None:
            times[node] = times.pop(node, 0) + 1  # anew at the end: after all its children
            node = node.parent
    return {node: num_holders(node) == count for node, count in times.items()}


def private_in_hbm(program: Program) -> Iterator[Node]:
    """Nodes in HBM that only this program holds, each before its parent."""
    return (node for node, private in held_nodes(program).items() if private and not node.evicted)


def report(program: Program, pinned: bool, page_size: int) -> Residency:
    """The program's Residency, in tokens; O(nodes that it holds)."""
    hbm = dram = shared = 0
    group = ""
    for node, private in held_nodes(program).items():
        if not private:
            shared += len(node.key)
            if node.parent.parent is None:
                group = _group(node.key, page_size)
            continue
        hbm += 0 if node.evicted else len(node.key)
        dram += len(node.key) if node.backuped else 0
    return Residency(
        program.name,
        program.epoch,
        program.label,
        hbm,
        dram,
        group,
        shared,
        pinned,
        len(program.runs),
    )


def _group(key: Any, page_size: int) -> str:
    """A name for all prompts that begin with the same page in the same namespace."""
    first = key[:page_size]
    digest = blake2b(array("q", first.token_ids).tobytes(), digest_size=8)
    digest.update(repr((first.extra_key, first.cache_salt)).encode())
    return digest.hexdigest()


def levels(cache: Any) -> Levels:
    """How full both pools are, in tokens."""
    controller = cache.cache_controller
    pool = controller.mem_pool_host.anchor_entry.host_pool
    allocator = cache.token_to_kv_pool_allocator
    writing = sum(ack.num_tokens for ack in controller.ack_write_queue)
    loading = sum(ack.num_tokens for ack in controller.ack_load_queue)
    free, evictable = allocator.available_size(), cache.tree_core.evictable_size()
    host_free = pool.available_size()
    return Levels(
        hbm=_level(allocator.size, free, evictable, writing + loading),
        dram=_level(pool.logical_size, host_free, _evictable_in_dram(cache), writing + loading),
        bytes_per_token=pool.size_per_token,
    )


def _level(capacity: int, free: int, evictable: int, in_flight: int) -> TierLevel:
    used = capacity - free - evictable
    return TierLevel(capacity, free, evictable, used - min(used, in_flight), min(used, in_flight))


def _evictable_in_dram(cache: Any) -> int:
    """Tokens in DRAM under no lock: SGLang keeps no such sum, so the tree is walked."""
    tokens = 0
    stack = list(cache.tree_core.root_node.children.values())
    while stack:
        node = stack.pop()
        data = node.component_data[0]
        if node.backuped and not data.host_lock_ref and node.write_through_pending_id is None:
            tokens += len(node.key)
        stack.extend(node.children.values())
    return tokens
