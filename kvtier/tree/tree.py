"""The radix tree of one worker: match, insert, protect, relabel, move and evict pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import TreeError
from kvtier.ids import Label
from kvtier.tree.eviction import Evicted, evict, victims
from kvtier.tree.keys import (
    Namespace,
    Pages,
    Tokens,
    as_pages,
    as_tokens,
    common_length,
    distinct,
)
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.order import Rules
from kvtier.tree.programs import Program, Programs, Run
from kvtier.tree.structure import Structure
from kvtier.tree.transfers import Transfer

Ints = Sequence[int] | npt.NDArray[np.integer]
_DEFAULT = Namespace()
_DESIGN = Rules()
_MANY = 1024  # entries of a queue that are never too many
_READABLE = (State.PRESENT, State.READING)


class Match(NamedTuple):
    """What is there of a prompt: `tokens` in all, the first `hbm_tokens` of them in HBM.

    `node` ends where the match ends; it is the root where nothing matched.
    """

    node: Node
    tokens: int
    hbm_tokens: int


class Inserted(NamedTuple):
    """`node` ends where the insert ended, after `end` tokens.

    `duplicates` are page ids that the tree did not take because it has these pages. Page ids for
    tokens from `end` on are the caller's still.
    """

    node: Node
    duplicates: Pages
    end: int


class RadixTree(Structure):
    """Pages of `page_size` tokens in two tiers, held by programs. One thread at a time."""

    def __init__(self, page_size: int = 16, rules: Rules = _DESIGN) -> None:
        if not isinstance(page_size, int) or page_size < 1:
            raise TreeError(f"page_size={page_size}; pass a whole number, 1 or more")
        super().__init__(page_size, rules)
        self.programs = Programs()
        self._protected: Counter[Node] = Counter()

    def match(self, tokens: Ints, namespace: Namespace = _DEFAULT) -> Match:
        """The longest prefix that is there, in whole pages; a node is split at its end."""
        key = as_tokens(tokens)
        at = in_hbm = 0
        node = self.root(namespace)
        while (child := self.child(node, key, at)) is not None:
            node = self._fit(child, key, at)
            if in_hbm == at and node.states[Tier.HBM] in _READABLE:
                in_hbm = node.end
            at = node.end
        self.touch(node)
        return Match(node, at, in_hbm)

    def insert(
        self,
        tokens: Ints,
        pages: Ints,
        namespace: Namespace = _DEFAULT,
        *,
        first_page: int = 0,
        after: Match | None = None,
        request: str | None = None,
    ) -> Inserted:
        """Add what was computed: page i of the prompt is HBM page pages[i - first_page].

        Pages before `first_page` are there already. Where a page is in HBM by now, the tree keeps
        its own and the given one is a duplicate; a page in DRAM alone is in HBM again. Where one is
        still being loaded, the insert ends before it: the load may fail, so the caller keeps its
        own. `after`, a match of the same prompt, spares comparing it again. `request` may extend
        the node that only it holds. Raises TreeError where the pages do not fit the tokens, where
        one is named twice, where a page before `first_page` is not in HBM, and for an `after` of
        another namespace; then nothing is taken. That pages are not in the tree already is the
        caller's duty, as is that `after` is of this prompt.
        """
        given, end = distinct(as_pages(pages)), len(tokens) - len(tokens) % self.page_size
        if first_page < 0 or given.size != end // self.page_size - first_page:
            raise TreeError(
                f"{given.size} pages from page {first_page} on do not fit {end} tokens in pages "
                f"of {self.page_size}"
            )
        node = self._resume(namespace, after, first_page, end)
        base = node.end
        key = as_tokens(tokens[base:end])  # from where it goes on: the rest is known to be equal
        duplicates: list[Pages] = []
        while (child := self.child(node, key, node.end - base)) is not None:
            start = node.end
            child = self._fit(child, key, start - base)
            mine = self._slice(given, first_page, start, child.end, child)
            if child.states[Tier.HBM] is State.WRITING and mine.size:
                end = start
                break
            node = child
            if node.states[Tier.HBM] is State.ABSENT:
                self._restore(node, mine)
            else:
                duplicates.append(mine)
        if node.end < end:
            mine = self._slice(given, first_page, node.end, end, None)
            node = self._extend(node, key[node.end - base :], mine, request)
        self.touch(node)
        return Inserted(node, np.concatenate(duplicates) if duplicates else given[:0], node.end)

    # --- programs ---

    def begin(
        self,
        request: str,
        program: str,
        match: Match,
        *,
        label: Label | None = None,
        epoch: int | None = None,
    ) -> Run:
        """A request of the program was matched for the first time; see Programs.begin.

        Matching it again while it waits counts nothing more: pass that to `programs.matched`.
        """
        self._check_alive(match.node)
        dropped = self.programs.run(request)
        dropped_at = None if dropped is None else dropped.anchor.node
        run = self.programs.begin(request, program, match.node, label=label, epoch=epoch)
        self._labels_fell(run.program)
        if dropped is not None:
            self._labels_fell(dropped.program)
            self.offer_path(dropped_at)
        return run

    def rematch(self, request: str, match: Match) -> None:
        """The waiting request was matched again; it counts once however often that happens."""
        self._check_alive(match.node)
        run = self.programs.run(request)
        if run is not None:
            before = run.anchor.node
            self.programs.matched(request, run, match.node)
            self.offer_path(before)
            self.offer_path(run.anchor.node)

    def publish(self, request: str, node: Node) -> None:
        """What the request has computed so far ends at `node`."""
        self._check_alive(node)
        run = self.programs.run(request)
        if run is not None:
            before = run.anchor.node
            self.programs.published(request, node)
            self.offer_path(before)
            self.offer_path(run.anchor.node)

    def retract(self, request: str) -> None:
        """The request lost its place in the engine and will be matched again."""
        self.programs.retracted(request)

    def end(self, request: str, *, well: bool) -> Program | None:
        """The request left the engine; see Programs.ended. Chains with one owner are joined."""
        run = self.programs.run(request)
        gone = [] if run is None else [anchor.node for anchor in (run.anchor, *run.suspended)]
        program = self.programs.ended(request, well=well)
        for node in gone:
            self._left(node)
        return program

    def relabel(self, program: str, label: Label, epoch: int | None = None) -> bool:
        """Relabel the pages of a program; False where the epoch is stale."""
        if not self.programs.relabel(program, label, epoch):
            return False
        known = self.programs.find(program)
        if known is not None:
            self._labels_fell(known)
        return True

    def release(self, program: str) -> None:
        """The program and its children give up their finished prompts, which become INACTIVE."""
        known = self.programs.find(program)
        if known is None:
            return
        family = list(known.family())
        held = [anchor.node for member in family for anchor in member.finished]
        self.programs.release(known)
        for member in family:
            self._labels_fell(member)
        for node in held:
            self._left(node)

    def adopt(self, program: str, parent: str) -> None:
        """The program is a sub-agent of `parent`; it is released with it, if not before.

        Raises TreeError where it has another parent, or is the parent's own ancestor.
        """
        self.programs.set_parent(program, parent)

    # --- protection ---

    def protect(self, node: Node) -> None:
        """A running request may read the path to `node`: it stays where it is until `unprotect`."""
        self._check_alive(node)
        self._protected[node] += 1
        self.lock(node, pin=True)

    def unprotect(self, node: Node) -> None:
        """End one `protect` of the same node; raises TreeError where there is none."""
        if not self._protected[node]:
            del self._protected[node]
            raise TreeError(f"node {node.id} is not protected")
        self._protected[node] -= 1
        if not self._protected[node]:
            del self._protected[node]
        self.lock(node, -1, pin=True)
        self._join(node)

    # --- room and copies ---

    def evict(self, tier: Tier, num_pages: int) -> Evicted | None:
        """Free exactly so many pages of the tier, in its order; None, and nothing, if it cannot."""
        if not isinstance(tier, Tier):
            raise TreeError(f"tier={tier!r}; pass Tier.HBM or Tier.DRAM")
        num_pages = _count(num_pages)
        queue = self.queues[tier]
        if len(queue) > 2 * self.num_nodes + _MANY:
            queue.rebuild(list(self.nodes()))
        return evict(self, tier, num_pages)

    def first_to_leave(self, num_pages: int) -> list[Node]:
        """The nodes that `evict` would take from HBM now, in that order, `num_pages` in all.

        Fewer where fewer are evictable. None leaves; the last is split where only its end would.
        """
        return victims(self, _count(num_pages))

    def copy_to(self, target: Tier, nodes: Sequence[Node], pages: Ints) -> Transfer:
        """Begin to copy whole nodes to `pages` of the other tier, one after the other.

        Their paths are protected until `finish`. Raises TreeError unless each node is PRESENT in
        the one tier and ABSENT in the other, and the pages are as many.
        """
        given = distinct(as_pages(pages))
        if len(set(nodes)) < len(nodes):
            raise TreeError("a node is named twice; copy each once")
        for node in nodes:
            states = node.states[target.other], node.states[target]
            if node.dead or states != (State.PRESENT, State.ABSENT):
                raise TreeError(f"node {node.id} cannot be copied to {target.name}: {states}")
        if given.size != sum(map(self.num_pages, nodes)):
            raise TreeError(f"{given.size} pages do not fit the nodes to copy")
        transfer = Transfer(target, list(nodes), self.page_size, self)
        at = 0
        for node in nodes:
            self.lock(node)
            with self.changing(node):
                node.set_pages(target, given[at : at + self.num_pages(node)])
                transfer.start(node)
            at += self.num_pages(node)
        return transfer

    def finish(self, transfer: Transfer, *, well: bool) -> Pages:
        """End a copy; returns the target pages to give back, which are none where it went well.

        A failed or cancelled copy leaves everything as it was before. Raises TreeError where the
        copy has ended already.
        """
        if transfer.owner is not self:
            raise TreeError("this copy is another tree's; finish it there")
        if transfer.ended:
            raise TreeError("this copy has ended; a copy is finished once")
        transfer.ended = True
        unused = np.empty(0, np.int32) if well else transfer.target_pages
        for node in transfer.nodes:
            with self.changing(node):
                transfer.end(node, well=well)
        for node in transfer.ends:
            self.lock(node, -1)
        for node in transfer.nodes:
            self.offer(node)
            self.offer_above(node)
            self._join(node)
        return unused

    # --- parts of the above ---

    def _fit(self, child: Node, key: Tokens, at: int) -> Node:
        """The child, or its front where only that is in the key."""
        same = common_length(key, at, child.tokens, self.page_size)
        return self.split(child, same) if same < child.size else child

    def _resume(self, namespace: Namespace, after: Match | None, first_page: int, end: int) -> Node:
        """Where an insert goes on: the end of `after` if it is still there, else the root."""
        if after is None or after.node.dead or after.node.end != after.tokens or not after.tokens:
            return self.root(namespace)
        # Only pages that the caller did not compute may be skipped: others might be duplicates.
        known = min(first_page * self.page_size, end)
        if after.tokens > known:
            return self.root(namespace)
        node = after.node
        while node.parent is not None:
            if node.states[Tier.HBM] not in _READABLE:
                return self.root(namespace)
            node = node.parent
        if self.roots.get(namespace) is not node:
            raise TreeError("`after` is a match in another namespace, or of another tree")
        return after.node

    def _slice(
        self, given: Pages, first_page: int, start: int, end: int, node: Node | None
    ) -> Pages:
        """The given pages of tokens [start, end); those before `first_page` must be in HBM."""
        first = start // self.page_size - first_page
        absent = node is None or node.states[Tier.HBM] is State.ABSENT
        if first < 0 and absent:
            raise TreeError(
                f"tokens from {start} on are not in HBM and no page was given for them; "
                f"pass first_page={start // self.page_size} or less"
            )
        return given[max(0, first) : max(0, end // self.page_size - first_page)]

    def _restore(self, node: Node, pages: Pages) -> None:
        """A node in DRAM alone was computed again."""
        with self.changing(node):
            node.states[Tier.HBM] = State.PRESENT
            node.set_pages(Tier.HBM, pages)
        self.offer(node)

    def _extend(self, node: Node, tokens: Tokens, pages: Pages, request: str | None) -> Node:
        if not self._may_grow(node, request):
            return self.add_leaf(node, tokens, pages)
        with self.changing(node):
            node.grow(tokens, (pages, None), self.page_size)
        return node

    def _may_grow(self, node: Node, request: str | None) -> bool:
        """Whether whatever is true of the node is true of what follows it in this request."""
        if node.parent is None or node.children or node.transfer is not None:
            return False
        if node.states != [State.PRESENT, State.ABSENT]:
            return False
        anchors = () if node.holding is None else node.holding.anchors
        run = None if request is None else self.programs.run(request)
        return all(run is not None and anchor is run.anchor for anchor in anchors)

    def _check_alive(self, node: Node) -> None:
        if node.dead:
            raise TreeError(f"node {node.id} is no more; match again")

    def _left(self, node: Node | None) -> None:
        """An anchor no longer ends at the node, or no longer counts."""
        self.offer_path(node)
        self._join(node)

    def _labels_fell(self, program: Program) -> None:
        for anchor in (*program.anchors(), *program.finished):
            self.offer_path(anchor.node)

    def _join(self, node: Node | None) -> None:
        """Join the nodes of the path and the only child below it where nothing tells them apart."""
        while node is not None and node.parent is not None and not node.dead:
            parent = node.parent
            if len(node.children) == 1:
                self.merge(node)
            node = parent


def _count(num_pages: int) -> int:
    if not isinstance(num_pages, int | np.integer) or num_pages < 0:
        raise TreeError(f"{num_pages} pages cannot leave; pass 0 or more")
    return int(num_pages)
