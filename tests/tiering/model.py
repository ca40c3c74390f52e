"""A plain model of two tiers: which page of which prompt is where, and what may become of it.

It does not know which page leaves next. It knows what a page may become in one step, what a copy
does, and what must stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.ids import Label
from kvtier.tiering.moves import Move
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, Root, State, Tier
from kvtier.tree.tree import RadixTree

from .memory import Content, ends

Path = int
"""A page of a prompt, with all that is before it."""
READABLE = (State.PRESENT, State.READING)


class Place(NamedTuple):
    """Where a page is in one tier."""

    state: State
    page: int


class Copy(NamedTuple):
    """Pages under way, with the page that each is read from and the one that is written."""

    source: Tier
    target: Tier
    pages: dict[Path, tuple[int, int]]


@dataclass
class Paths:
    """Numbers for pages: equal exactly where namespace and all tokens up to the end are."""

    page_size: int
    known: dict[tuple[object, ...], Path] = field(default_factory=dict)
    above: dict[Path, Path] = field(default_factory=dict)

    def root(self, namespace: Namespace) -> Path:
        return self.known.setdefault((namespace,), len(self.known))

    def after(self, path: Path, tokens: list[int]) -> list[Path]:
        """The whole pages of `tokens`, which follow `path`."""
        found = []
        for at in range(0, len(tokens) - len(tokens) % self.page_size, self.page_size):
            key = (path, *tokens[at : at + self.page_size])
            number = self.known.setdefault(key, len(self.known))
            self.above[number] = path
            path = number
            found.append(path)
        return found

    def of(self, namespace: Namespace, tokens: list[int]) -> list[Path]:
        return self.after(self.root(namespace), tokens)


@dataclass
class Seen:
    """What a tree has: the place of each page, and the pages on the way to each node."""

    places: dict[Tier, dict[Path, Place]]
    ways: dict[Node, list[Path]]


def look_at(tree: RadixTree, paths: Paths) -> Seen:
    seen = Seen({tier: {} for tier in Tier}, {})
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        way = [] if isinstance(parent, Root) else seen.ways[parent]
        above = paths.root(parent.namespace) if isinstance(parent, Root) else way[-1]
        mine = paths.after(above, node.tokens.tolist())
        seen.ways[node] = way + mine
        for tier in Tier:
            if node.states[tier] is not State.ABSENT:
                pages = node.pages(tier, tree.page_size).tolist()
                for path, page in zip(mine, pages, strict=True):
                    assert path not in seen.places[tier], "a page of a prompt lies in two nodes"
                    seen.places[tier][path] = Place(node.states[tier], page)
    return seen


@dataclass
class Step:
    """What was done: the only causes that the model accepts for what it sees next."""

    published: dict[Path, tuple[int, Content]] = field(default_factory=dict)
    ended: Move | None = None
    well: bool = False
    started: list[Move] = field(default_factory=list)


@dataclass
class Model:
    """Places and contents of all pages, and the copies under way."""

    places: dict[Tier, dict[Path, Place]] = field(default_factory=lambda: {t: {} for t in Tier})
    contents: dict[Tier, dict[Path, Content]] = field(default_factory=lambda: {t: {} for t in Tier})
    copies: dict[Move, Copy] = field(default_factory=dict)

    def states(self, path: Path) -> tuple[State, State]:
        hbm, dram = self.places[Tier.HBM].get(path), self.places[Tier.DRAM].get(path)
        return (hbm.state if hbm else State.ABSENT, dram.state if dram else State.ABSENT)

    def leading(self, paths: list[Path], *tiers: Tier) -> int:
        """How many of the first pages can be read in one of the tiers, now or after a copy."""
        for at, path in enumerate(paths):
            states = self.states(path)
            if not any(states[tier] in READABLE for tier in tiers):
                return at
        return len(paths)

    def go(self, step: Step, seen: Seen, pinned: set[Path]) -> set[Path]:
        """Take over what is seen if the step explains it; returns the pages that are lost."""
        before = {tier: dict(places) for tier, places in self.places.items()}
        contents = {tier: dict(found) for tier, found in self.contents.items()}
        if step.ended is not None:
            _end(self.copies.pop(step.ended), step.well, before, contents)
        for path, (page, content) in step.published.items():
            if path not in before[Tier.HBM]:
                before[Tier.HBM][path] = Place(State.PRESENT, page)
                contents[Tier.HBM][path] = content
        for tier in Tier:
            self._keep(tier, before, seen, pinned)
        for move in step.started:
            self.copies[move] = _copy_of(move, seen, before)
        self._check_copies(seen)
        was = set(self.places[Tier.HBM]) | set(self.places[Tier.DRAM]) | set(step.published)
        self.places = seen.places
        self.contents = {
            tier: {
                path: contents[tier][path]
                for path, place in seen.places[tier].items()
                if place.state in READABLE
            }
            for tier in Tier
        }
        return was - set(seen.places[Tier.HBM]) - set(seen.places[Tier.DRAM])

    def _keep(
        self, tier: Tier, before: dict[Tier, dict[Path, Place]], seen: Seen, pinned: set[Path]
    ) -> None:
        """What was whole and in use is where it was; nothing is there without a cause."""
        places = seen.places[tier]
        for path, place in before[tier].items():
            now = places.get(path)
            same = now is not None and now.page == place.page
            if place.state is not State.PRESENT:
                assert same, f"{tier.name}: a page went away under a copy"
            elif path in pinned and not (tier is Tier.DRAM and path in before[Tier.HBM]):
                assert same, f"{tier.name}: a page went away under a request"
            elif not same:
                assert now is None or now.state is State.WRITING, "a page moved without a copy"
        for path, now in places.items():
            assert path in before[tier] or now.state is State.WRITING, "a page without a cause"

    def _check_copies(self, seen: Seen) -> None:
        """What is READING or WRITING is in one copy, and what is in a copy is so."""
        expected: dict[Tier, dict[Path, Place]] = {tier: {} for tier in Tier}
        for copy in self.copies.values():
            for path, (source, target) in copy.pages.items():
                assert path not in expected[copy.source]
                expected[copy.source][path] = Place(State.READING, source)
                expected[copy.target][path] = Place(State.WRITING, target)
        for tier in Tier:
            moving = {p: at for p, at in seen.places[tier].items() if at.state != State.PRESENT}
            assert moving == expected[tier]


def _end(
    copy: Copy,
    well: bool,
    places: dict[Tier, dict[Path, Place]],
    contents: dict[Tier, dict[Path, Content]],
) -> None:
    for path, (source, target) in copy.pages.items():
        assert places[copy.source][path] == Place(State.READING, source)
        places[copy.source][path] = Place(State.PRESENT, source)
        del places[copy.target][path]
        if well:
            places[copy.target][path] = Place(State.PRESENT, target)
            contents[copy.target][path] = contents[copy.source][path]


def _copy_of(move: Move, seen: Seen, before: dict[Tier, dict[Path, Place]]) -> Copy:
    source, target = ends(move)
    paths = {place.page: path for path, place in seen.places[source].items()}
    read, written = move.source_pages.tolist(), move.target_pages.tolist()
    assert len(read) == len({*read}) == len({*written}) > 0
    pages = {paths[page]: (page, to) for page, to in zip(read, written, strict=True)}
    assert pages.keys() <= before[source].keys(), "a copy reads what was never written"
    return Copy(source, target, pages)


@dataclass(eq=False)
class Held:
    """A prompt, as far as it is there: what is lost of it does not come back to its holder."""

    paths: list[Path]


@dataclass
class Program:
    """What a program holds: prompts of requests that ended well, and of those that run."""

    namespace: Namespace
    tokens: list[int]
    label: Label = Label.BUSY
    released: bool = False
    finished: list[Held] = field(default_factory=list)
    runs: dict[str, Held] = field(default_factory=dict)
    suspended: dict[str, list[Held]] = field(default_factory=dict)

    def begin(self, request: str, paths: list[Path]) -> None:
        if self.released:
            self.label, self.released = Label.BUSY, False
        self.runs[request] = Held(list(paths))
        self.suspended[request] = list(self.finished)

    def end(self, request: str, *, well: bool) -> None:
        run, old = self.runs.pop(request), self.suspended.pop(request)
        if well:
            gone = {id(held) for held in old}
            for held in (self.finished, *self.suspended.values()):
                held[:] = [one for one in held if id(one) not in gone]
            self.finished.append(run)

    def release(self) -> None:
        self.label, self.released = Label.INACTIVE, True
        self.finished.clear()
        for old in self.suspended.values():
            old.clear()

    def held(self) -> list[Held]:
        return [*self.runs.values(), *self.finished]

    def wanted(self) -> set[Path]:
        """Pages that its label speaks for."""
        old = {id(held) for found in self.suspended.values() for held in found}
        counted = [held for held in self.held() if id(held) not in old]
        return {path for held in counted for path in held.paths}
