"""What a radix tree must hold, by the rules alone: a dict from the path of each page to the page.

It knows no nodes. A path is the namespace and the tokens of each page from the root on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.tree.counters import TierPages
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.order import Rules
from kvtier.tree.tree import RadixTree

from .known_holders import Holders

Path = tuple[Any, ...]
Pair = tuple[State, State]
ABSENT, WRITING, PRESENT, READING = State


@dataclass(eq=False)
class Page:
    """State and page id by tier, and when it was used last."""

    states: list[State]
    ids: list[int | None]
    access: int

    @property
    def pair(self) -> Pair:
        return self.states[Tier.HBM], self.states[Tier.DRAM]


@dataclass(eq=False)
class Copy:
    """A copy of pages; `ends` are the last pages of what was to be copied as one."""

    target: Tier
    pages: list[Path]
    ends: list[Path]


@dataclass(eq=False)
class Model:
    pages: dict[Path, Page] = field(default_factory=dict)
    pins: Counter[Path] = field(default_factory=Counter)
    copies: list[Copy] = field(default_factory=list)
    holders: Holders = field(default_factory=Holders)
    clock: int = 0
    rules: Rules = field(default_factory=Rules)

    def existing(self, path: Path) -> list[Path]:
        """The pages of the path that are there, first to last."""
        found = []
        for page in prefixes(path):
            if page not in self.pages:
                break
            found.append(page)
        return found

    def pairs(self, paths: Iterable[Path]) -> set[Pair]:
        """States of all pages of these paths."""
        return {self.pages[page].pair for path in paths for page in self.existing(path)}

    def match(self, path: Path) -> tuple[int, int]:
        """Pages that are there, and those before the first that HBM cannot give."""
        found = self.existing(path)
        self._touch(found)
        return len(found), self.readable(path)

    def readable(self, path: Path) -> int:
        """Pages of the path before the first that HBM cannot give."""
        states = [self.pages[page].states[Tier.HBM] for page in self.existing(path)]
        absent = (i for i, state in enumerate(states) if state not in (PRESENT, READING))
        return next(absent, len(states))

    def insert(
        self, path: Path, ids: Sequence[int], first: int, may_stop: set[int]
    ) -> tuple[list[int], int] | None:
        """Duplicates, and pages from the root on that are in the tree now.

        None, and nothing done, where a page before `first` is not in HBM. It ends at the last of
        `may_stop`, which are the beginnings of nodes, before a page that is being loaded.
        """
        pages = list(prefixes(path))
        known = [self.pages.get(page) for page in pages]
        if any(page is None or page.states[Tier.HBM] is ABSENT for page in known[:first]):
            return None
        loading = [at for at, page in enumerate(known) if page and page.states[0] is WRITING]
        stop = next((at for at in loading if at >= first), len(pages))
        end = stop if stop == len(pages) else max(at for at in may_stop if at <= stop)
        pages, known, ids = pages[:end], known[:end], ids[: max(0, end - first)]
        duplicates = []
        for page_id, path_, page in zip(ids, pages[first:], known[first:], strict=True):
            if page is None:
                self.pages[path_] = Page([PRESENT, ABSENT], [page_id, None], 0)
            elif page.states[Tier.HBM] is ABSENT:
                page.states[Tier.HBM], page.ids[Tier.HBM] = PRESENT, page_id
            else:
                duplicates.append(page_id)
        self._touch(pages)
        return duplicates, end

    def may_grow(self, end: Path, request: str | None) -> bool:
        """Whether what follows `end` in the request has its fate from the beginning."""
        if self.pages[end].pair != (PRESENT, ABSENT) or self.has_children(end):
            return False
        name = None if request is None else self.holders.running(request)
        own = name is not None and self.holders.programs[name].running[request].path == end
        return self.holders.num_ends(end) == own

    def moved(self, old: Path, new: Path) -> None:
        """What ended at the one page ends at the other."""
        self.holders.deleted(old, new)
        if old in self.pins:
            self.pins[new] += self.pins.pop(old)

    def has_children(self, path: Path) -> bool:
        return any(len(p) == len(path) + 1 and p[:-1] == path for p in self.pages)

    # --- room and copies ---

    def evicted(self, tier: Tier, ids: dict[Tier, list[int]]) -> int:
        """Pages left the tier, and with them what nothing could reach; returns how many are lost.

        Asserts that each page was one that may leave.
        """
        locks = self.locks()
        where = {(t, page.ids[t]): path for path, page in self.pages.items() for t in Tier}
        gone = {t: [where[t, page_id] for page_id in ids[t]] for t in Tier}
        for path in gone[tier]:
            assert self.evictable(path, tier, locks)
        for path in gone[tier.other]:
            assert self.pages[path].states[tier.other] is PRESENT
            assert not locks[path]
        for t, paths in gone.items():
            for path in paths:
                self.pages[path].states[t], self.pages[path].ids[t] = ABSENT, None
        lost = [path for path, page in self.pages.items() if page.pair == (ABSENT, ABSENT)]
        for path in sorted(lost, key=len, reverse=True):
            del self.pages[path]
            self.holders.deleted(path, path[:-1])
        # One that was in the other tier goes only because what is before it is lost.
        assert all(path in lost and path[:-1] in lost for path in gone[tier.other])
        assert all(len(path) == 2 or path[:-1] in self.pages for path in self.pages)
        return len(lost)

    def copy(self, target: Tier, ends: dict[Path, list[Path]], ids: Sequence[int]) -> Copy:
        """Copy the pages of each end, which follow each other, to `ids`."""
        copy = Copy(target, [path for pages in ends.values() for path in pages], list(ends))
        for path, page_id in zip(copy.pages, ids, strict=True):
            page = self.pages[path]
            page.states[target.other], page.states[target] = READING, WRITING
            page.ids[target] = page_id
        self.copies.append(copy)
        return copy

    def finish(self, copy: Copy, *, well: bool) -> list[int | None]:
        """Ids of the target that are free again."""
        unused = []
        for page in (self.pages[path] for path in copy.pages):
            page.states[copy.target.other] = PRESENT
            page.states[copy.target] = PRESENT if well else ABSENT
            if not well:
                unused.append(page.ids[copy.target])
                page.ids[copy.target] = None
        self.copies.remove(copy)
        return unused

    def locks(self) -> Counter[Path]:
        """How many protect each page."""
        found: Counter[Path] = Counter()
        copied = Counter(end for copy in self.copies for end in copy.ends)
        for end, times in (self.pins + copied).items():
            for path in prefixes(end):
                found[path] += times
        return found

    def evictable(self, path: Path, tier: Tier, locks: Counter[Path]) -> bool:
        """A page that no copy uses and no request may read; in DRAM any that HBM has, too."""
        page = self.pages[path]
        duplicate = tier is Tier.DRAM and page.states[Tier.HBM] is not ABSENT
        free = not self.rules.keep_duplicates if duplicate else not locks[path]
        return page.states[tier] is PRESENT and free

    def most(self, tier: Tier) -> int:
        """How many pages can leave the tier."""
        return self.tier_pages(tier).evictable

    def tier_pages(self, tier: Tier) -> TierPages:
        locks, pinned, found = self.locks(), Counter[Path](), TierPages()
        for end in +self.pins:
            pinned.update(prefixes(end))
        for path, page in self.pages.items():
            if self.evictable(path, tier, locks):
                found.evictable += 1
            elif page.states[tier] is PRESENT:
                found.protected += 1
            elif page.states[tier] is not ABSENT:
                found.in_flight += 1
            found.pinned += pinned[path] > 0 and page.states[tier] is not ABSENT
        return found

    def first_to_leave(self, tier: Tier, ends: dict[Path, Node]) -> Path:
        """The page that leaves next: last access and id are the node's, the rest is known here."""
        locks = self.locks()
        there = [path for path in self.pages if self._blocks(path, tier)]
        blocked = {front for path in there for front in prefixes(path[:-1])}
        keys = []
        for end, node in ends.items():
            duplicate = tier is Tier.DRAM and self.pages[end].states[Tier.HBM] is not ABSENT
            if self.evictable(end, tier, locks) and (duplicate or end not in blocked):
                rank = self._class(end, tier, duplicate)
                keys.append((rank, node.last_access, -node.start, node.id, end))
        return min(keys, key=lambda key: key[:4])[4]

    def _blocks(self, path: Path, tier: Tier) -> bool:
        """Whether what is before the page stays while it is there."""
        states = self.pages[path].states
        stuck = self.rules.keep_duplicates and tier is Tier.DRAM and states[Tier.HBM] is not ABSENT
        return states[tier] is not ABSENT and not stuck

    def _class(self, end: Path, tier: Tier, duplicate: bool) -> int:
        _, idle, busy = self.holders.counts(end)
        label = "busy" if busy or not self.rules.labels else "idle" if idle else "inactive"
        if tier is Tier.HBM:
            return ("inactive", "idle", "busy").index(label)
        if duplicate and label != "inactive":
            label = f"{label} duplicate"
        return ("inactive", "busy duplicate", "idle duplicate", "busy", "idle").index(label)

    def seen(self) -> dict[Path, tuple[Any, ...]]:
        """All that is to be compared of each page."""
        locks = self.locks()
        return {
            path: (page.pair, tuple(page.ids), locks[path], self.holders.counts(path))
            for path, page in self.pages.items()
        }

    def _touch(self, paths: Iterable[Path]) -> None:
        self.clock += 1
        for path in paths:
            self.pages[path].access = self.clock


def prefixes(path: Path) -> Iterator[Path]:
    """Each page of the path, as its own path."""
    return (path[:end] for end in range(2, len(path) + 1))


def path_of(namespace: Namespace, tokens: Sequence[int], page_size: int) -> Path:
    """The path of the last whole page."""
    end = len(tokens) - len(tokens) % page_size
    cuts = range(0, end, page_size)
    return (namespace, *(tuple(tokens[at : at + page_size]) for at in cuts))


def nodes_of(tree: RadixTree) -> dict[Path, Node]:
    """All nodes but roots by the path of their last page."""
    found: dict[Path, Node] = {}
    stack: list[tuple[Path, Node]] = [((name,), root) for name, root in tree.roots.items()]
    while stack:
        path, node = stack.pop()
        if node.parent is not None:
            path = (*path, *path_of(path[0], node.tokens.tolist(), tree.page_size)[1:])
            found[path] = node
        stack.extend((path, child) for child in node.children.values())
    return found


def seen_of(tree: RadixTree, ends: dict[Path, Node]) -> dict[Path, tuple[Any, ...]]:
    """The same of a tree as Model.seen."""
    found = {}
    for end, node in ends.items():
        num_pages = node.size // tree.page_size
        ids: list[Sequence[int | None]] = [
            [None] * num_pages if node.states[t] is ABSENT else node.pages(t, tree.page_size)
            for t in Tier
        ]
        counts = [0, 0, 0] if node.holding is None else list(node.holding.counts)
        for at, pair in enumerate(zip(*ids, strict=True)):
            path = end[: len(end) - num_pages + at + 1]
            found[path] = (tuple(node.states), pair, node.locks, counts)
    return found
