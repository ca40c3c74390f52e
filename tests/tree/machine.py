"""A state machine of all that can happen to a radix tree, compared with its model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvtier.ids import Label
from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import Node, Tier
from kvtier.tree.tree import Match

from .driver import Driver, Prompt, random_prompt
from .model import Pair, Path, nodes_of, prefixes, seen_of

NAMES = ("p0", "p1", "p2")


def index(choose: Random) -> dict[str, Any]:
    return {"index": choose.randrange(1000)}


def prompt(choose: Random) -> dict[str, Any]:
    return {"prompt": random_prompt(choose)}


def well(choose: Random) -> dict[str, Any]:
    return index(choose) | {"well": choose.random() < 0.5}


def name(choose: Random) -> dict[str, Any]:
    return {"name": choose.choice(NAMES)}


def label(choose: Random) -> dict[str, Any]:
    return name(choose) | {
        "label": choose.choice([*Label]),
        "step": choose.choice((None, 2, -1, -1)),
    }


OPERATIONS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "turn": lambda c: name(c) | prompt(c),
    "match": prompt,
    "insert": lambda c: (
        prompt(c) | {"first": c.choice(("0", "HBM", "any")), "matched": c.random() < 0.5}
    ),
    "insert_after_an_old_match": lambda c: index(c) | prompt(c),
    "begin": lambda c: {"request": c.choice("abcd")} | label(c) | prompt(c),
    "begin_unlabelled": lambda c: {"request": c.choice("abcd")} | name(c) | prompt(c),
    "rematch": index,
    "publish": lambda c: index(c) | prompt(c) | {"fresh": c.random() < 0.5},
    "retract": index,
    "end": well,
    "relabel": label,
    "release": name,
    "protect": index,
    "unprotect": index,
    "evict": lambda c: {
        "tier": c.choice((*Tier, Tier.HBM)),
        "share": c.choice((0, 1, 1, 2, 2, 3, 5, "most", "more")),
    },
    "copy": lambda c: {
        "tier": c.choice([*Tier]),
        "indices": [c.randrange(1000) for _ in range(c.randrange(1, 4))],
    },
    "finish": well,
    "demote": index,
}
NEEDS = {
    "insert_after_an_old_match": "matches",
    **dict.fromkeys(("rematch", "publish", "retract", "end"), "requests"),
    "protect": "ends",
    "unprotect": "pins",
    "finish": "transfers",
}
"""What must not be empty."""
OFTEN = (
    "turn",
    "insert",
    *("publish",) * 4,
    "rematch",
    "relabel",
    "relabel",
    "copy",
    "copy",
    "evict",
    "demote",
    "demote",
)


class Machine(Driver):
    # Arguments come from a seed: hypothesis varies few examples in many ways, and what it draws
    # itself is mostly what it drew before. Of many rules it would leave out most in each run.
    @rule(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 20))
    def walk(self, seed: int, count: int) -> None:
        choose = Random(seed)
        for _ in range(count):
            operation = choose.choice([*OPERATIONS, *OFTEN])
            arguments = OPERATIONS[operation](choose)
            if operation not in NEEDS or getattr(self, NEEDS[operation]):
                note(f"{operation} {arguments}")
                getattr(self, operation)(**arguments)
                self.compare()

    def some_request(self, index: int) -> str:
        return sorted(self.requests)[index % len(self.requests)]

    def held_by(self, name: str | None) -> set[Pair]:
        """States of the pages that the program holds."""
        known = None if name is None else self.model.holders.programs.get(name)
        return set() if known is None else self.model.pairs(known.held())

    # --- prompts ---

    def match(self, prompt: Prompt) -> None:
        self.do_match(*self.resolve(prompt))

    def insert(self, prompt: Prompt, first: str, matched: bool) -> None:
        """Somebody without a program inserts, sometimes after a fresh match."""
        namespace, tokens = self.resolve(prompt)
        match = self.do_match(namespace, tokens)
        in_hbm = match.hbm_tokens // self.page_size
        pages = len(tokens) // self.page_size
        at = {"0": 0, "HBM": in_hbm, "any": prompt.base % (pages + 1)}[first]
        self.do_insert(namespace, tokens, at, match if matched else None)

    def insert_after_an_old_match(self, index: int, prompt: Prompt) -> None:
        match, namespace, tokens = self.matches[index % len(self.matches)]
        if not prompt.base % 2:  # as it was; else it goes on
            prompt = prompt._replace(more=[])
        whole = len(tokens) // self.page_size * self.page_size
        tokens = self.extended(tokens[:whole], prompt)
        self.do_insert(namespace, tokens, match.hbm_tokens // self.page_size, match)

    # --- programs and requests ---

    def begin(
        self, request: str, name: str, prompt: Prompt, label: Label | None, step: int | None
    ) -> None:
        holders = self.model.holders
        namespace, tokens = self.resolve(prompt)
        match = self.do_match(namespace, tokens)
        path = self.path(namespace, tokens)[: 1 + match.tokens // self.page_size]
        known = holders.programs.get(name)
        epoch = None if step is None else max(0, (known.epoch if known else 0) + step)
        self.hit("begin", self.model.pairs([path]))
        held = known.finished if known else []
        left = {page for prompt in held for page in prefixes(prompt.path)} - {*prefixes(path)}
        self.hit("compaction", (self.model.pages[page].pair for page in left))
        self.tree.begin(request, name, match, label=label, epoch=epoch)
        holders.ended(request, False)  # an earlier one with this id was dropped
        if label is not None:
            holders.relabel(name, label, epoch)
        holders.begin(request, name, path, labelled=label is not None)
        self.requests[request] = (namespace, tokens, match)

    def begin_unlabelled(self, request: str, name: str, prompt: Prompt) -> None:
        self.begin(request, name, prompt, None, None)

    def turn(self, name: str, prompt: Prompt) -> None:
        """A request that comes alone, and ends well."""
        self.begin("turn", name, prompt, None, None)
        self.publish_as("turn", prompt, fresh=False)
        self.end_as("turn", well=True)

    def rematch(self, index: int) -> None:
        request = self.some_request(index)
        namespace, tokens, _ = self.requests[request]
        match = self.do_match(namespace, tokens)
        path = self.path(namespace, tokens)[: 1 + match.tokens // self.page_size]
        self.hit("rematch", self.model.pairs([path]))
        self.tree.rematch(request, match)
        self.model.holders.matched(request, path)
        self.requests[request] = (namespace, tokens, match)

    def publish(self, index: int, prompt: Prompt, fresh: bool) -> None:
        """The request computes its prompt and more, from what its last match found."""
        self.publish_as(self.some_request(index), prompt, fresh=fresh)

    def publish_as(self, request: str, prompt: Prompt, *, fresh: bool) -> None:
        namespace, tokens, match = self.requests[request]
        if fresh:
            match = self.do_match(namespace, tokens)
        whole = len(tokens) // self.page_size * self.page_size
        tokens = self.extended(tokens[:whole], prompt)
        first = match.hbm_tokens // self.page_size
        node = self.do_insert(namespace, tokens, first, match, request)
        if node is None:
            return
        path = self.path(namespace, tokens)[: 1 + node.end // self.page_size]
        self.hit("publish", self.model.pairs([path]))
        self.tree.publish(request, node)
        self.model.holders.published(request, path)
        in_hbm = self.model.readable(path) * self.page_size
        self.requests[request] = (namespace, tokens, Match(node, node.end, in_hbm))

    def retract(self, index: int) -> None:
        request = self.some_request(index)
        self.hit("retract", self.held_by(self.model.holders.running(request)))
        self.tree.retract(request)
        self.model.holders.retracted(request)

    def end(self, index: int, well: bool) -> None:
        self.end_as(self.some_request(index), well=well)

    def end_as(self, request: str, *, well: bool) -> None:
        del self.requests[request]
        name = self.model.holders.running(request)
        self.hit("end well" if well else "abort", self.held_by(name))
        program = self.tree.end(request, well=well)
        assert program is not None
        assert program.name == name
        self.model.holders.ended(request, well)
        assert self.tree.end(request, well=well) is None

    def relabel(self, name: str, label: Label, step: int | None) -> None:
        known = self.model.holders.programs.get(name)
        epoch = None if step is None else max(0, (known.epoch if known else 0) + step)
        done = self.model.holders.relabel(name, label, epoch)
        self.hit("relabel" if done else "stale epoch", self.held_by(name))
        assert self.tree.relabel(name, label, epoch) is done

    def release(self, name: str) -> None:
        self.hit("release", self.held_by(name))
        self.tree.release(name)
        if name in self.model.holders.programs:
            self.model.holders.release(name)

    # --- protection, room and copies ---

    def protect(self, index: int) -> None:
        path, node = sorted(self.ends.items(), key=lambda item: item[1].id)[index % len(self.ends)]
        self.hit("protect", self.model.pairs([path]))
        self.tree.protect(node)
        self.pins.append(node)
        self.model.pins[path] += 1

    def unprotect(self, index: int) -> None:
        node = self.pins.pop(index % len(self.pins))
        path = next(path for path, found in self.ends.items() if found is node)
        self.hit("unprotect", self.model.pairs([path]))
        self.tree.unprotect(node)
        self.model.pins[path] -= 1

    def evict(self, tier: Tier, share: int | str) -> None:
        most = self.model.most(tier)
        counts = {"most": most // 2, "more": most + 1}
        self.do_evict(tier, counts[share] if isinstance(share, str) else share)

    def copy(self, tier: Tier, indices: list[int]) -> None:
        nodes = self.copyable(tier)
        if nodes:
            chosen = dict.fromkeys(nodes[index % len(nodes)] for index in indices)
            self.do_copy(tier, list(chosen))

    def finish(self, index: int, well: bool) -> None:
        transfer, copy = self.transfers.pop(index % len(self.transfers))
        self.do_finish(transfer, copy, well=well)

    def demote(self, index: int) -> None:
        """A node is copied to DRAM, and as many pages leave HBM."""
        nodes = self.copyable(Tier.DRAM)
        if nodes:
            node = nodes[index % len(nodes)]
            self.do_copy(Tier.DRAM, [node])
            self.do_finish(*self.transfers.pop(), well=True)
            self.do_evict(Tier.HBM, min(self.tree.num_pages(node), self.model.most(Tier.HBM)))

    # --- what must be true at rest ---

    @invariant()
    def compare(self) -> None:
        check_integrity(self.tree)
        self.compare_pages()
        self.compare_programs()

    def compare_pages(self) -> None:
        ends = nodes_of(self.tree)
        seen = seen_of(self.tree, ends)
        assert seen == self.model.seen()
        for tier in Tier:
            assert self.tree.pages[tier] == self.model.tier_pages(tier)
            out = [ids[tier] for _, ids, _, _ in seen.values() if ids[tier] is not None]
            assert sorted(out + self.free[tier]) == list(range(self.made[tier]))
        for end, node in ends.items():
            anchors = 0 if node.holding is None else len(node.holding.anchors)
            assert anchors == self.model.holders.num_ends(end)
            assert self.model.pages[end].access <= node.last_access
            assert node.parent is not None
            assert node.last_access <= node.parent.last_access
        self.compare_nodes_with_those_before(ends)

    def compare_programs(self) -> None:
        known = self.model.holders.programs
        assert {p.name: (p.label, p.epoch) for p in self.tree.programs} == {
            name: (program.label, program.epoch) for name, program in known.items()
        }
        assert sorted(self.requests) == sorted(self.model.holders.all_running())

    def compare_nodes_with_those_before(self, ends: dict[Path, Node]) -> None:
        pairs = {path: page.pair for path, page in self.model.pages.items()}
        before, now = self.ends.keys(), ends.keys()
        self.hit("split", (pairs[end] for end in now - before if end in self.pairs))
        joined = (before - now) & pairs.keys() - {self.grown}
        self.hit("join", (pairs[end] for end in joined))
        self.ends, self.pairs, self.grown = ends, pairs, None
