"""A radix tree and the model of it, driven with the same prompts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvtier.errors import TreeError
from kvtier.tree.integrity import check_integrity
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, Tier
from kvtier.tree.order import Rules
from kvtier.tree.transfers import Transfer
from kvtier.tree.tree import Match, RadixTree

from .model import ABSENT, PRESENT, Copy, Model, Pair, Path, nodes_of, path_of, prefixes

NAMESPACES = (
    Namespace(),
    Namespace(tenant="x"),
    Namespace(weights="x"),
    Namespace(adapter="x"),
    Namespace(tenant="y"),
    Namespace(weights="y"),
)
RULES = (Rules(), Rules(), Rules(labels=False), Rules(keep_duplicates=True))
MAX_PAGES = 10
ALONE = {Tier.HBM: (PRESENT, ABSENT), Tier.DRAM: (ABSENT, PRESENT)}
"""States in HBM and DRAM of pages with one copy."""

COVERED: Counter[tuple[str, Pair]] = Counter()
"""How often an operation met a page in these states of HBM and DRAM."""


class Prompt(NamedTuple):
    """An earlier prompt cut to `keep` pages, then `more` pages and an incomplete one."""

    base: int
    keep: int
    more: list[int]
    rest: int
    namespace: int


def random_prompt(choose: random.Random) -> Prompt:
    """Mostly in the namespace of the prompt that it comes from, and mostly all of that."""
    return Prompt(
        base=choose.randrange(1000),
        keep=choose.choice((choose.randrange(MAX_PAGES), MAX_PAGES)),
        more=choose.choices(range(3), k=choose.choice((0, 0, 1, 2, 4))),
        rest=choose.randrange(3),
        namespace=choose.randrange(4 * len(NAMESPACES)),
    )


def block(kind: int, page_size: int) -> list[int]:
    """One page of three that differ in the first token, or in nothing but the last."""
    head, last = ((1, 1), (1, 2), (2, 1))[kind]
    return [kind] if page_size == 1 else [head] * (page_size - 1) + [last]


class Driver(RuleBasedStateMachine):
    """Does the same to a tree and to its model, and compares what both say."""

    @initialize(
        page_size=st.sampled_from((1, 16, 64)),
        rules=st.sampled_from(RULES),
        seed=st.integers(0, 2**32),
    )
    def start(self, page_size: int, rules: Rules, seed: int) -> None:
        """Some prompts are there already, some of them in DRAM; `seed` says which."""
        self.page_size = page_size
        self.tree, self.model = RadixTree(page_size, rules), Model(rules=rules)
        self.random = random.Random(seed)
        self.prompts: list[tuple[Namespace, list[int]]] = []
        self.requests: dict[str, tuple[Namespace, list[int], Match]] = {}
        self.matches: list[tuple[Match, Namespace, list[int]]] = []
        self.pins: list[Node] = []
        self.transfers: list[tuple[Transfer, Copy]] = []
        self.free: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        self.made = dict.fromkeys(Tier, 0)
        self.ends: dict[Path, Node] = {}
        self.pairs: dict[Path, Pair] = {}
        self.grown: Path | None = None
        for _ in range(self.random.randrange(16)):
            self.prepare()
        self.ends = nodes_of(self.tree)
        self.pairs = {path: page.pair for path, page in self.model.pages.items()}

    def prepare(self) -> None:
        """A prompt is computed; then some node may go to DRAM, with or without what follows."""
        prompt, choose = random_prompt(self.random), self.random.randrange
        assert self.do_insert(*self.resolve(prompt), 0, None) is not None
        nodes = self.copyable(Tier.DRAM)
        if nodes and choose(2):
            self.do_copy(Tier.DRAM, [self.random.choice(nodes)])
            self.do_finish(*self.transfers.pop(), well=True)
            self.do_evict(Tier.HBM, choose(6))

    # --- what rules share ---

    def take(self, tier: Tier, count: int) -> list[int]:
        """Page ids that are free; those that were given back come again, in any order."""
        free = self.free[tier]
        new = max(0, count - len(free))
        free.extend(range(self.made[tier], self.made[tier] + new))
        self.made[tier] += new
        self.random.shuffle(free)
        taken, self.free[tier] = free[:count], free[count:]
        return taken

    def give(self, tier: Tier, ids: Iterable[int]) -> None:
        self.free[tier].extend(map(int, ids))

    def hit(self, operation: str, pairs: Iterable[Pair]) -> None:
        for pair in sorted(set(pairs)):
            COVERED[operation, pair] += 1
            event(f"{operation}: {pair[0].name} {pair[1].name}")

    def resolve(self, prompt: Prompt) -> tuple[Namespace, list[int]]:
        """The prompt's tokens; mostly in the namespace of the one that it comes from."""
        namespace, tokens = NAMESPACES[0], []
        if self.prompts:
            namespace, tokens = self.prompts[prompt.base % len(self.prompts)]
        if prompt.namespace < len(NAMESPACES):
            namespace = NAMESPACES[prompt.namespace]
        return namespace, self.extended(tokens[: prompt.keep * self.page_size], prompt)

    def extended(self, tokens: list[int], prompt: Prompt) -> list[int]:
        more = [token for kind in prompt.more for token in block(kind, self.page_size)]
        tokens = (tokens + more)[: MAX_PAGES * self.page_size]
        return tokens + [1] * (0, 1, self.page_size - 1)[prompt.rest] * (self.page_size > 1)

    def path(self, namespace: Namespace, tokens: list[int]) -> Path:
        return path_of(namespace, tokens, self.page_size)

    def do_match(self, namespace: Namespace, tokens: list[int]) -> Match:
        path = self.path(namespace, tokens)
        self.hit("match", self.model.pairs([path]))
        match = self.tree.match(np.array(tokens, np.int64), namespace)
        num_pages, in_hbm = self.model.match(path)
        assert match[1:] == (num_pages * self.page_size, in_hbm * self.page_size)
        assert match.node.end == match.tokens
        node: Node | None = match.node
        while node is not None:
            assert node.last_access == self.model.clock
            node = node.parent
        self.matches = [*self.matches[-20:], (match, namespace, tokens)]
        return match

    def do_insert(
        self,
        namespace: Namespace,
        tokens: list[int],
        first: int,
        after: Match | None,
        request: str | None = None,
    ) -> Node | None:
        """None where the tree refused, as the model did."""
        path = self.path(namespace, tokens)
        known = self.model.existing(path)
        may_grow = bool(known) and self.model.may_grow(known[-1], request)
        met = self.model.pairs([path])
        ids = self.take(Tier.HBM, len(path) - 1 - first)
        starts = [(end, node.start // self.page_size) for end, node in nodes_of(self.tree).items()]
        borders = {at for end, at in starts if end[: 1 + at] == path[: 1 + at]}
        done = self.model.insert(path, ids, first, borders)
        try:
            node, unused, end = self.tree.insert(
                tokens, ids, namespace, first_page=first, after=after, request=request
            )
        except TreeError:
            assert done is None
            self.give(Tier.HBM, ids)
            self.hit("insert refused", met)
            return None
        assert done is not None
        assert unused.tolist() == done[0]
        assert node.end == end == done[1] * self.page_size
        self.give(Tier.HBM, [*unused, *ids[max(0, done[1] - first) :]])
        path = path[: 1 + done[1]]
        self.hit("insert", met)
        if known and len(known) < len(path) - 1 and node.start < len(known) * self.page_size:
            assert may_grow
            self.grown = known[-1]
            self.hit("grow", [self.model.pages[known[-1]].pair])
            self.model.moved(known[-1], path)
        self.prompts = [*self.prompts[-12:], (namespace, tokens)]
        return node

    def copyable(self, target: Tier) -> list[Node]:
        """Nodes that a copy may begin with, oldest first."""
        pages = self.model.pages
        nodes = nodes_of(self.tree).items()
        found = [node for end, node in nodes if pages[end].pair == ALONE[target.other]]
        return sorted(found)

    def do_copy(self, target: Tier, nodes: list[Node]) -> None:
        ends = {node: end for end, node in nodes_of(self.tree).items() if node in nodes}
        sizes = [self.tree.num_pages(node) for node in nodes]
        pages = {ends[n]: [*prefixes(ends[n])][-s:] for n, s in zip(nodes, sizes, strict=True)}
        self.hit(f"copy to {target.name}", [ALONE[target.other]])
        ids = self.take(target, sum(sizes))
        transfer = self.tree.copy_to(target, nodes, ids)
        assert transfer.target_pages.tolist() == ids
        self.transfers.append((transfer, self.model.copy(target, pages, ids)))

    def do_finish(self, transfer: Transfer, copy: Copy, *, well: bool) -> None:
        pages = [self.model.pages[path].ids for path in copy.pages]
        pairs = [(ids[copy.target.other], ids[copy.target]) for ids in pages]
        found = zip(transfer.source_pages, transfer.target_pages, strict=True)
        assert sorted(found) == sorted(pairs)
        self.hit("finish well" if well else "cancel", (self.model.pages[copy.pages[0]].pair,))
        unused = self.tree.finish(transfer, well=well)
        assert sorted(unused.tolist()) == sorted(self.model.finish(copy, well=well))
        self.give(copy.target, unused)

    def do_evict(self, tier: Tier, count: int) -> None:
        most, first = self.model.most(tier), None
        if 0 < count <= most:
            first = self.model.first_to_leave(tier, nodes_of(self.tree))
        first_id = None if first is None else self.model.pages[first].ids[tier]
        leaving = self.leaving(count) if tier is Tier.HBM else None
        evicted = self.tree.evict(tier, count)
        assert (evicted is None) is (count > most)
        if evicted is None:
            return
        ids = {t: evicted.ids(t).tolist() for t in Tier}
        pairs = {page.ids[tier]: page.pair for page in self.model.pages.values()}
        self.hit(f"evict {tier.name}", (pairs[page_id] for page_id in ids[tier]))
        assert leaving is None or sorted(ids[tier]) == leaving
        # A duplicate that is kept is lost with what is before it, and was not counted.
        assert len(ids[tier]) == count or (
            len(ids[tier]) > count > 0 and self.model.rules.keep_duplicates
        )
        assert first_id is None or first_id in ids[tier]
        assert evicted.lost == self.model.evicted(tier, ids)
        for t in Tier:
            self.give(t, ids[t])

    def leaving(self, count: int) -> list[int]:
        """What the tree says would leave HBM, which changes nothing."""
        nodes = self.tree.first_to_leave(count)
        check_integrity(self.tree)
        pages = [node.pages(Tier.HBM, self.page_size).tolist() for node in nodes]
        found = sorted(page for ids in pages for page in ids)
        assert len(found) == min(count, self.model.most(Tier.HBM))
        return found
