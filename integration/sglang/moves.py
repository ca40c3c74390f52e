"""Demote and promote a program's pages without a request, between two steps of the scheduler."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.utils import get_device_module

from kvtier.integration.sglang.control.protocol import Result, Status
from kvtier.integration.sglang.residency import held_nodes, private_in_hbm
from kvtier.tree.holders import Node, num_holders
from kvtier.tree.programs import Program


class Moves:
    """Copies that commands started. Called from the scheduler thread only."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._demoting: dict[str, Program] = {}
        self._loads: list[Any] = []

    def demote(self, program: Program) -> Result:
        """Copy what the program alone has in HBM to DRAM; `advance` frees it in HBM."""
        nodes = list(private_in_hbm(program))
        if not nodes:
            return Result(Status.DONE, "nothing in HBM is the program's alone")
        for node in reversed(nodes):  # parents first: DRAM holds no page without those before it
            if not node.backuped and not self._back_up(node):
                break
        self._cache.flush_pending_backups()
        kept = sum(len(node.key) for node in nodes if not node.backuped)
        moved = sum(len(node.key) for node in nodes) - kept
        reason = f"DRAM has no room for {kept} tokens, they stay in HBM" if kept else ""
        if not moved:
            return Result(Status.REFUSED, reason)
        self._demoting[program.name] = program
        return Result(Status.STARTED, reason, moved)

    def promote(self, program: Program) -> Result:
        """Copy what the program has in DRAM alone back into HBM."""
        ends = [a.node for a in program.anchors() if a.node is not None and a.node.evicted]
        if not ends:
            return Result(Status.DONE, "nothing of the program is in DRAM alone")
        if not self._cache.has_free_load_back_slot():
            return Result(Status.REFUSED, "too many loads are under way; ask again")
        loaded = wanted = 0
        for end in ends:
            tokens = _tokens_to_load(end)
            wanted += tokens
            if tokens and self._cache.load_back(end.id):
                loaded += tokens
        if not loaded:
            return Result(Status.REFUSED, self._no_load(wanted, program))
        controller = self._cache.cache_controller
        controller.start_loading()
        self._loads.append(controller.ack_load_queue[-1].finish_event)
        return Result(Status.STARTED, "", loaded)

    def stop(self, program: str) -> None:
        """Leave in HBM what a demotion has not freed yet."""
        self._demoting.pop(program, None)

    def forget(self) -> None:
        """The tree was emptied."""
        self._demoting.clear()

    def advance(self) -> None:
        """Free in HBM what has arrived in DRAM, for every demotion that nothing has overtaken."""
        for name, program in list(self._demoting.items()):
            if program.runs or not self._free(program):
                del self._demoting[name]

    def order_loads(self) -> None:
        """Let whatever the current stream runs from now on wait for the loads of `promote`.

        Their pages can be matched at once. A request's own load is waited for layer by layer; these
        have no request, so the batch that reads them first waits for the whole copy.
        """
        self._loads = [event for event in self._loads if not event.query()]
        for event in self._loads:
            event.wait(get_device_module().current_stream())

    def _back_up(self, node: Node) -> bool:
        core = self._cache.tree_core
        # Write-through keeps DRAM copies from the root down; write-back copies what it evicts.
        action = BackupKV([node.id]) if core.is_write_back else core.build_backup_kv_action(node.id)
        written: int = self._cache._execute_and_commit_kv_backup(action)
        return written > 0

    def _free(self, program: Program) -> bool:
        """Free the nodes that can be freed now; True while copies or requests still need some."""
        core = self._cache.tree_core
        waiting = False
        for node in [node for node in private_in_hbm(program) if node.backuped]:
            for branch in _unheld_below(node):
                self._drop(branch)
            if node in core.evictable_device_leaves:
                self._cache._evict_device_leaf(node.id, Counter())
            else:
                waiting = True
        return waiting

    def _drop(self, leaf: Node) -> None:
        """Free a branch's end that nobody holds; only a copy that it has already stays in DRAM."""
        if leaf not in self._cache.tree_core.evictable_device_leaves:
            return
        if self._cache._evict_device_leaf(leaf.id, Counter()) is not None:
            self._cache._drop_subtree_no_host(leaf.id, Counter())

    def _no_load(self, wanted: int, program: Program) -> str:
        free = self._cache.token_to_kv_pool_allocator.available_size()
        own = sum(len(n.key) for n in held_nodes(program) if _is_evictable(n))
        room = free + self._cache.tree_core.evictable_size() - own
        least = self._cache.load_back_threshold
        if wanted < least:
            return f"{wanted} tokens are in DRAM alone; fewer than {least} are not worth a load"
        return f"HBM has room for {room} tokens, {wanted} are in DRAM alone"


def _unheld_below(node: Node) -> list[Node]:
    """What hangs below a program's own node in HBM, ends first: an answer that was not kept, say.

    Nobody holds it: who did would hold the node, too.
    """
    found: list[Node] = []
    stack = [child for child in node.children.values() if num_holders(child) == 0]
    while stack:
        current = stack.pop()
        if not current.evicted:
            found.append(current)
            stack.extend(current.children.values())
    return found[::-1]


def _is_evictable(node: Node) -> bool:
    return not node.evicted and node.component_data[ComponentType.FULL].lock_ref == 0


def _tokens_to_load(node: Node) -> int:
    tokens = 0
    while node.parent is not None and node.evicted:
        tokens += len(node.key)
        node = node.parent
    return tokens
