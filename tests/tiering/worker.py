"""A tier manager in random lives: each answer, and each page's way, is compared with a model."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from kvtier.errors import TieringError
from kvtier.ids import Label
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.moves import Move
from kvtier.tree.node import State, Tier

from .laws import Request, Watched
from .model import READABLE, Path, Program, Step

MAX_PAGES, MAX_RUNNING = 14, 4
EARLY = ((), ("waiting", "loading"), ("growing", "failed"))

DRAM_ALONE = (State.ABSENT, State.PRESENT)


class Worker(Watched):
    """Requests, programs and moves in any order."""

    # --- requests ---

    def prompt(self, choose: Random, name: str) -> list[int]:
        """The program's last prompt, sometimes cut, or another's, and some more."""
        size, namespace = self.page_size, self.programs[name].namespace
        if choose.random() < 0.2:  # twins: what one computes is the other's, too
            running = [r for r in self.requests.values() if r.given.namespace == namespace]
            if running:
                return choose.choice(running).tokens
        tokens = self.programs[choose.choice((name,) * 6 + (*self.programs,)[:6])].tokens
        if choose.random() < 0.12 or len(tokens) > MAX_PAGES * size:
            tokens = tokens[: choose.randrange(min(len(tokens), 10 * size) + 1)]
        whole = len(tokens) // size * size if choose.random() < 0.9 else len(tokens)
        tokens = tokens[:whole]
        for _ in range(choose.choice((0, 0, 1, 1, 2, 3))):
            kind = choose.choice((1, 2, 3, 3, self.next() + 10))
            tokens = tokens + [1] * (size - 1) + [kind]
        return tokens + [9] * choose.choice((0, size // 2))

    def open(
        self, choose: Random, name: str | None = None, tokens: list[int] | None = None
    ) -> Request | None:
        name = name or choose.choice([*self.programs])
        program = self.programs[name]
        if len(program.runs) > choose.choice((0, 0, 1)) or len(self.requests) >= MAX_RUNNING:
            return None
        tokens = self.prompt(choose, name) if tokens is None else tokens
        request = Request(f"r{self.next()}", name, tokens)
        way = self.way(request)
        found = next((at for at, p in enumerate(way) if self.lost(p)), len(way))
        hbm = [self.model.states(path)[Tier.HBM] for path in way[:found]]
        there, absent = sum(state in READABLE for state in hbm), hbm.count(State.ABSENT)
        spare = choose.choice((0, 0, 0, 2))
        num_pages = -(-len(request.tokens) // self.page_size) + choose.choice((0, 0, 1))
        fits = num_pages - found + absent + spare <= self.available(way[:found])
        self.hit("open", way[:found])
        lease = self.manager.open(
            request.tokens,
            num_pages=num_pages,
            request=request.name,
            program=name,
            namespace=program.namespace,
            spare_pages=spare,
            on_ready=partial(self.became_ready, request),
        )
        assert (lease is not None) is fits
        self.done[f"open: {lease and lease.state}"] += 1
        if lease is not None:
            assert (lease.hbm_pages, lease.dram_pages) == (there, found - there)
            assert lease.cached == found
            self.found[0] += there
            self.found[1] += found - there
            request.lease = lease
            self.requests[request.name] = request
            program.begin(request.name, way[:found])
            if lease.state is LeaseState.READY:
                self.write(request)
        self.check(Step())
        return None if lease is None else request

    def became_ready(self, request: Request, lease: Lease) -> None:
        assert lease is request.given
        assert not request.told, "a request is told twice"
        request.told = True
        assert lease.state in (LeaseState.READY, LeaseState.FAILED)
        if lease.state is LeaseState.READY:
            self.write(request)

    def come_back(self, choose: Random) -> None:
        """A program whose KV is in DRAM, with a twin who shares the load."""
        down = [name for name in self.programs if self.is_down(name)]
        if down:
            name = choose.choice(down)
            if choose.random() < 0.5:
                self.hit_program(choose, name, "promote")
            request = self.open(choose, name)
            if request is not None:
                self.open(choose, choose.choice(self.family(request)), request.tokens)
                if choose.random() < 0.2:
                    self.hit_program(choose, name, choose.choice(("release", "relabel")))

    def race(self, choose: Random) -> None:
        """Another program computes what a request is about to compute; later it is loaded."""
        slow = self.some(choose, "ready", "growing")
        if slow is None:
            return
        name = choose.choice(self.family(slow))
        if DRAM_ALONE in {self.model.states(path) for path in self.way(slow)}:
            self.open(choose, name, slow.tokens)
            self.publish(choose, slow)
        else:
            self.turn(choose, name, slow.tokens)
            self.hit_program(choose, name, "demote")

    def family(self, request: Request) -> list[str]:
        """Programs that may share its pages."""
        namespace = request.given.namespace
        return [name for name, one in self.programs.items() if one.namespace == namespace]

    def is_down(self, name: str) -> bool:
        held = self.programs[name].held()
        return any(self.model.states(path) == DRAM_ALONE for one in held for path in one.paths)

    def turn(
        self, choose: Random, name: str | None = None, tokens: list[int] | None = None
    ) -> None:
        """A whole request, where it need not wait."""
        request = self.open(choose, name, tokens)
        if request is not None and request.state == "ready":
            self.publish(choose, request)
            self.close(choose, request)

    def publish(self, choose: Random, request: Request | None = None) -> None:
        """All of the prompt, or the first part of it, is computed."""
        request = request or self.some(choose, *choose.choice((("ready", "growing"), ("growing",))))
        if request is None:
            return
        lease, way = request.given, self.way(request)
        most = min(len(way), lease.cached + lease.own.size)
        if most < lease.cached:
            return
        end = most if choose.random() < 0.8 else choose.randint(lease.cached, most)
        last = request.tokens[: end * self.page_size + choose.choice((0, self.page_size - 1))]
        own = dict(zip(way[lease.cached : end], lease.own.tolist(), strict=False))
        stops = [p for p in own if self.model.states(p)[Tier.HBM] is State.WRITING]
        taken = [path for path in own if not stops or own[path] in self.before(own, stops[0])]
        new = [path for path in taken if self.model.states(path)[Tier.HBM] is State.ABSENT]
        self.hit("publish", own)
        self.done[f"publish: {request.state}"] += 1
        step = Step({path: (own[path], request.written[own[path]]) for path in new})
        for path in taken:
            del request.written[own[path]]
        self.manager.publish(lease, last)
        program = self.programs[request.program]
        program.runs[request.name].paths = way[: lease.cached]
        program.tokens = request.tokens
        self.check(step)
        assert lease.cached == end - len(own) + len(taken)

    @staticmethod
    def before(own: dict[Path, int], stop: Path) -> list[int]:
        """The pages of a prompt before one of them."""
        return [*own.values()][: [*own].index(stop)]

    def extend(self, choose: Random) -> None:
        request = self.some(choose, "ready")
        if request is None:
            return
        lease = request.given
        count = choose.choice((1, 1, 2, 6))
        fits = count <= self.available([])
        granted = self.manager.extend(lease, count, partial(self.write, request))
        assert (granted is not None) is fits
        self.done[f"extend: {granted}"] += 1
        if granted is not None:
            more = [1] * (self.page_size - 1) + [self.next() + 10]
            request.tokens = request.tokens + more * choose.choice((0, 1))
        if granted:
            self.write(request)
        self.check(Step())

    def shrink(self, choose: Random) -> None:
        request = self.some(choose, "ready")
        if request is not None:
            lease = request.given
            count = choose.randrange(min(3, lease.own.size + 1))
            for page in lease.own[lease.own.size - count :].tolist():
                del request.written[page]
            self.manager.shrink(lease, count)
            request.tokens = request.tokens[: lease.num_pages * self.page_size]
            self.done["shrink"] += 1
            self.check(Step())

    def hand_over(self, choose: Random) -> None:
        """Pages of one request become another's, as the simulator's buffer hands them out."""
        giver, taker = self.some(choose, "ready"), self.some(choose, "ready")
        if giver is None or taker is None or giver is taker:
            return
        count = choose.randrange(min(3, giver.given.own.size + 1))
        giver.given.give_to(taker.given, count)
        giver.tokens = giver.tokens[: giver.given.num_pages * self.page_size]
        for request in (giver, taker):
            self.write(request)
        self.done["hand over"] += 1
        self.check(Step())

    def close(self, choose: Random, request: Request | None = None) -> None:
        request = request or self.some(choose, *choose.choice(EARLY))
        if request is None:
            return
        likely = {"ready": 0.8, "growing": 0.4}.get(request.state, 0)
        well = choose.random() < likely
        del self.requests[request.name]
        self.ended.append(request)
        how = "well" if well else "early"
        self.hit(f"close {how}", self.way(request)[: request.given.cached])
        self.done[f"close {how}: {request.state}"] += 1
        self.manager.close(request.given, well=well)
        program = self.programs[request.program]
        program.end(request.name, well=well)
        self.check(Step())
        if well and self.roomy and self.manager.mode.write_through:
            held = [path for one in program.finished for path in one.paths]
            assert all(self.model.places[Tier.DRAM].get(path) for path in held), "no copy was made"

    def misuse(self, choose: Random) -> None:
        """What must not be done changes nothing."""
        request = self.some(choose, "waiting", "loading", "failed")
        if request is not None:
            with pytest.raises(TieringError, match="not ready"):
                self.manager.publish(request.given, request.tokens)
            with pytest.raises(TieringError, match="not ready"):
                self.manager.extend(request.given, 1, lambda: None)
            self.done[f"misuse: {request.state}"] += 1
        growing = self.some(choose, "growing")
        if growing is not None:
            with pytest.raises(TieringError, match="growing already"):
                self.manager.extend(growing.given, 1, lambda: None)
            self.done["misuse: growing"] += 1
        if self.ended and self.ended_moves:
            with pytest.raises(TieringError, match="ended already"):
                self.manager.close(choose.choice(self.ended).given, well=True)
            with pytest.raises(TieringError, match="ended already"):
                self.manager.ended(choose.choice(self.ended_moves), well=True)
            self.done["misuse: ended"] += 1
        found = [one for one in self.requests.values() if one.given.cached]
        if found:
            request = choose.choice(found)
            with pytest.raises(TieringError, match="less than"):
                self.manager.open(request.tokens, num_pages=0, namespace=request.given.namespace)
        self.check(Step())

    # --- moves ---

    def end_move(self, choose: Random) -> None:
        if not self.mover.moves:
            return
        move = self.mover.moves.pop(choose.randrange(len(self.mover.moves)))
        well = choose.random() >= self.failing
        if well:
            self.mover.copy(move)
        self.moved[move.direction, well] += move.num_pages
        how = "ends well" if well else "fails"
        self.hit(f"{move.direction} {how}", self.model.copies[move].pages)
        self.done[f"{move.why} {how}"] += 1
        self.ended_moves.append(move)
        self.manager.ended(move, well=well)
        self.check(Step(ended=move, well=well))

    # --- programs ---

    def program(self, choose: Random) -> None:
        acts = ("relabel", "relabel", "demote", "demote", "demote", "promote", "promote", "release")
        self.hit_program(choose, choose.choice([*self.programs]), choose.choice(acts))

    def hit_program(self, choose: Random, name: str, act: str) -> None:
        program = self.programs[name]
        state = "running" if program.runs else "idle"
        self.done[f"{act}: {state}"] += 1
        self.hit(act, {path for held in program.held() for path in held.paths})
        getattr(self, act)(choose, name, program)
        self.check(Step())

    def relabel(self, choose: Random, name: str, program: Program) -> None:
        program.label, program.released = choose.choice([*Label]), False
        assert self.manager.relabel(name, program.label)

    def release(self, choose: Random, name: str, program: Program) -> None:
        del choose
        if self.manager.tree.programs.find(name) is not None:
            program.release()
        self.manager.release(name)

    def demote(self, choose: Random, name: str, program: Program) -> None:
        """As a scheduler does: an IDLE program is demoted, now and then a BUSY one."""
        if choose.random() < 0.8:
            program.label, program.released = Label.IDLE, False
            self.manager.relabel(name, Label.IDLE)
        held = {path for one in program.held() for path in one.paths}
        answer = self.manager.demote(name)
        move = isinstance(answer, Move)
        self.done[f"demote: {'moves' if move else answer}"] += 1
        if program.runs or not held or not self.manager.mode.offload:
            assert answer is False
        assert move is bool(self.mover.started)
        if isinstance(answer, Move):
            hbm = self.model.places[Tier.HBM]
            source = answer.source_pages.tolist()
            read = {path for path in held if path in hbm and hbm[path].page in source}
            assert len(read) == answer.num_pages, "another program's pages go down"
            assert not self.manager.mode.labels or not read & self.busy()

    def busy(self) -> set[Path]:
        busy = [one for one in self.programs.values() if one.label is Label.BUSY]
        return {path for one in busy for path in one.wanted()}

    def promote(self, choose: Random, name: str, program: Program) -> None:
        del choose, program
        self.prefetches += 1
        answer = self.manager.promote(name, self.prefetched)
        self.prefetches -= not answer
        self.done[f"promote: {'moves' if self.mover.started else answer}"] += 1

    def prefetched(self, well: bool) -> None:
        self.prefetches -= 1
        self.done[f"prefetched: {well}"] += 1

    def clear(self, choose: Random) -> None:
        assert self.manager.room.clear(choose.randrange(8)) == self.pools[Tier.HBM].num_free
        assert not self.mover.started, "room without a copy was asked for"
        self.done["clear"] += 1
        self.check(Step())

    # --- lives ---

    def walk(self, choose: Random, steps: int) -> None:
        for _ in range(steps):
            choose.choice(ACTS)(self, choose)

    def drain(self, choose: Random) -> None:
        """All moves end: every promise is kept, and nothing is in use once all have left."""
        while self.mover.moves or self.requests:
            while self.mover.moves:
                self.end_move(choose)
            request = self.some(choose)
            if request is not None:
                self.close(choose, request)
        assert self.manager.tree.pages[Tier.HBM].pinned == 0
        assert self.manager.room.promised == 0


ACTS = (
    *(Worker.turn,) * 5,
    *(Worker.open,) * 4,
    *(Worker.come_back,) * 4,
    *(Worker.race,) * 2,
    *(Worker.publish,) * 4,
    *(Worker.end_move,) * 3,
    *(Worker.program,) * 4,
    *(Worker.close,) * 3,
    *(Worker.extend,) * 2,
    Worker.shrink,
    Worker.hand_over,
    Worker.clear,
    Worker.misuse,
)
