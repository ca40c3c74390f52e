"""A tier manager whose pages have contents: what a page holds shows when it was misused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvtier.ids import Direction, Label
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tiering.room import TierMode
from kvtier.tree.node import State, Tier, path_to

Content = tuple[int, ...]
"""The tokens up to the end of a page: what its KV was computed from."""


@dataclass
class SlowMover:
    """Copies contents at the end of a move, as late as a real copy may read them."""

    contents: dict[Tier, dict[int, Content]] = field(default_factory=lambda: {t: {} for t in Tier})
    moves: list[Move] = field(default_factory=list)
    hurried: list[Move] = field(default_factory=list)

    def start(self, move: Move) -> None:
        self.moves.append(move)

    def hasten(self, move: Move) -> None:
        assert move in self.moves, "a move that has ended is hurried"
        self.hurried.append(move)

    def copy(self, move: Move) -> None:
        source, target = Tier.HBM, Tier.DRAM
        if move.direction is Direction.H2D:
            source, target = target, source
        pairs = zip(move.source_pages.tolist(), move.target_pages.tolist(), strict=True)
        for page, to in pairs:
            self.contents[target][to] = self.contents[source][page]


class Worker:
    """Requests, programs and moves in any order; everything is checked after each step."""

    def __init__(
        self, seed: int, hbm: int, dram: int, mode: TierMode, page_size: int, failing: float
    ) -> None:
        self.random = random.Random(seed)
        self.mover = SlowMover()
        self.page_size = page_size
        self.failing = failing
        reserve = self.random.choice((0, hbm // 4))
        self.manager = TierManager(
            hbm, dram, self.mover, page_size=page_size, mode=mode, reserve_pages=reserve
        )
        self.prompts = {name: [0] * 3 * page_size for name in ("p0", "p1", "p2", "p3", "p4", "p5")}
        self.leases: dict[str, tuple[Lease, str, list[int]]] = {}
        self.ready: set[str] = set()
        self.done: list[str] = []
        self.num_requests = 0
        self.next_token = 1

    def content(self, tokens: list[int], page: int) -> Content:
        return tuple(tokens[: (page + 1) * self.page_size])

    # --- operations ---

    def open(self) -> None:
        name = self.random.choice([*self.prompts])
        if any(program == name for _, program, _ in self.leases.values()):
            return
        tokens = self.prompts[name]
        if self.random.random() < 0.08:  # a compaction, or an edit of the history
            tokens = tokens[: self.random.randrange(len(tokens) + 1)]
        more = self.random.randrange(3 * self.page_size)
        tokens = tokens + [self.next_token] * more
        self.next_token += 1
        request = f"r{self.num_requests}"
        self.num_requests += 1
        lease = self.manager.open(
            tokens,
            num_pages=-(-len(tokens) // self.page_size),
            request=request,
            program=name,
            on_ready=lambda lease: self.became_ready(request, lease),
        )
        if lease is not None:
            self.leases[request] = (lease, name, tokens)
            self.done.append(f"open {lease.state}")
            if lease.state is LeaseState.READY:
                self.ready.add(request)

    def became_ready(self, request: str, lease: Lease) -> None:
        assert request not in self.ready
        if lease.state is LeaseState.READY:
            self.ready.add(request)

    def publish(self) -> None:
        """The rest of the prompt is computed, into the lease's own pages."""
        if not self.ready:
            return
        request = self.random.choice(sorted(self.ready))
        lease, name, tokens = self.leases[request]
        if lease.want is not None:
            return
        pages = lease.pages.tolist()
        for at in range(lease.cached, len(tokens) // self.page_size):
            self.mover.contents[Tier.HBM][pages[at]] = self.content(tokens, at)
        self.manager.publish(lease, tokens)
        self.prompts[name] = tokens
        self.done.append("publish")

    def extend(self) -> None:
        """Output: a page more of it."""
        if not self.ready:
            return
        request = self.random.choice(sorted(self.ready))
        lease, name, tokens = self.leases[request]
        if lease.want is None and len(tokens) % self.page_size == 0:
            tokens = tokens + [self.next_token] * self.page_size
            granted = self.manager.extend(lease, 1, lambda: None)
            if granted is not None:
                self.leases[request] = (lease, name, tokens)
                self.next_token += 1
                self.done.append(f"extend {granted}")

    def close(self) -> None:
        if self.leases:
            request = self.random.choice(sorted(self.leases))
            lease, _, _ = self.leases.pop(request)
            self.done.append(f"close {lease.state}")
            self.ready.discard(request)
            self.manager.close(lease, well=self.random.random() < 0.7)

    def end_move(self) -> None:
        if self.mover.moves:
            move = self.mover.moves.pop(self.random.randrange(len(self.mover.moves)))
            well = self.random.random() >= self.failing
            if well:
                self.mover.copy(move)
            self.done.append(f"end {move.direction} {move.why} {well}")
            self.manager.ended(move, well=well)

    def program(self) -> None:
        name = self.random.choice([*self.prompts])
        act = self.random.choice(("relabel", "relabel", "demote", "promote", "release"))
        self.done.append(act)
        if act == "relabel":
            self.manager.relabel(name, self.random.choice([*Label]))
        else:
            getattr(self.manager, act)(name)

    def step(self) -> None:
        acts = (self.open, self.open, self.publish, self.publish, self.extend, self.close)
        acts += (self.end_move, self.end_move, self.end_move, self.program)
        self.random.choice(acts)()
        self.check()

    # --- laws ---

    def check(self) -> None:
        check_integrity(self.manager)
        for node in self.manager.tree.nodes():
            tokens = [token for part in path_to(node) for token in part.tokens.tolist()]
            for tier in Tier:
                if node.states[tier] in (State.PRESENT, State.READING):
                    for at, page in enumerate(node.pages(tier, self.page_size).tolist()):
                        expected = self.content(tokens, node.start // self.page_size + at)
                        assert self.mover.contents[tier][page] == expected
        for request in self.ready:
            lease, _, tokens = self.leases[request]
            for at, page in enumerate(lease.pages.tolist()[: lease.cached]):
                assert self.mover.contents[Tier.HBM][page] == self.content(tokens, at)

    def drain(self) -> None:
        """All moves end: every promise is kept, and the pools are whole once all have left."""
        while self.mover.moves:
            self.end_move()
            self.check()
        for request, (lease, _, _) in self.leases.items():
            assert lease.state in (LeaseState.READY, LeaseState.FAILED), (request, lease.state)
            assert lease.want is None
        while self.leases:
            self.close()
            while self.mover.moves:
                self.end_move()
            self.check()
        assert self.manager.tree.pages[Tier.HBM].pinned == 0
