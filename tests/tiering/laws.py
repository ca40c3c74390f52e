"""A tier manager under watch: what must be true of it after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from random import Random

from kvtier.ids import Direction, Label
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.kept import Kept
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tiering.room import TierMode
from kvtier.tree.keys import Namespace
from kvtier.tree.node import State, Tier

from .memory import FREED, Content, SlowMover, WatchedPool
from .model import READABLE, Model, Path, Paths, Program, Step, look_at

MANY = 4000
"""Pages of a DRAM that is never full."""
DEFAULT, OTHER = Namespace(), Namespace(tenant="other")


class Request:
    """A request, and what it wrote into the pages that are its own."""

    def __init__(self, name: str, program: str, tokens: list[int]) -> None:
        self.name = name
        self.program = program
        self.tokens = tokens
        self.lease: Lease | None = None
        self.written: dict[int, Content] = {}
        self.told = False

    @property
    def given(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def state(self) -> str:
        growing = self.given.state is LeaseState.READY and self.given.want is not None
        return "growing" if growing else str(self.given.state)


class Watched:
    """A tier manager, who uses it, and the model; `check` compares them after each step."""

    def __init__(
        self,
        sizes: tuple[int, int],
        mode: TierMode,
        page_size: int,
        failing: float,
        reserve: int = 0,
        num_programs: int = 6,
    ) -> None:
        hbm, dram = sizes
        self.mover = SlowMover()
        self.page_size = page_size
        self.failing = failing
        self.roomy = dram == MANY and failing == 0
        pools = {
            tier: WatchedPool(size, partial(self.check_given, tier))
            for tier, size in ((Tier.HBM, hbm), (Tier.DRAM, dram))
        }
        self.pools = pools
        self.manager = TierManager(
            pools[Tier.HBM],
            pools[Tier.DRAM],
            self.mover,
            page_size=page_size,
            mode=mode,
            reserve_pages=reserve,
        )
        self.paths = Paths(page_size)
        self.model = Model()
        self.programs = {  # a third of them are another tenant's
            f"p{at}": Program(DEFAULT if at % 3 else OTHER, []) for at in range(num_programs)
        }
        self.requests: dict[str, Request] = {}
        self.ways: dict[Lease, list[Path]] = {}
        self.ended: list[Request] = []
        self.ended_moves: list[Move] = []
        self.done: Counter[str] = Counter()
        self.moved: Counter[tuple[Direction, bool]] = Counter()
        self.found = [0, 0]
        self.num_dropped = 0
        self.prefetches = 0
        self.serial = 0

    # --- helpers ---

    def next(self) -> int:
        self.serial += 1
        return self.serial

    def hit(self, what: str, paths: Iterable[Path] = ()) -> None:
        """Count the operation, with the states of the pages that it meets."""
        self.count(what, {self.model.states(path) for path in paths} - {(State.ABSENT,) * 2})

    def count(self, what: str, pairs: set[tuple[State, State]]) -> None:
        self.done.update(f"{what} {hbm.name} {dram.name}" for hbm, dram in pairs)

    def way(self, request: Request) -> list[Path]:
        return self.paths.of(self.programs[request.program].namespace, request.tokens)

    def some(self, choose: Random, *states: str) -> Request | None:
        """A request, of those in one of the states where some are named."""
        fit = [one for one in self.requests.values() if not states or one.state in states]
        return choose.choice(fit) if fit else None

    def pinned(self) -> set[Path]:
        """Pages that a request may read, or will."""
        return {path for way in self.ways.values() for path in way}

    def available(self, more: list[Path]) -> int:
        """Pages of HBM that can be promised once the path `more` stays, too."""
        leases = self.manager.leases
        wants = [lease.want for lease in leases if lease.want is not None]
        taken = sum(lease.own.size for lease in leases)
        taken += sum(pages.size for want in wants for pages in want.pages)
        stay = (self.pinned() | {*more}) & self.model.places[Tier.HBM].keys()
        promised = sum(want.missing for want in wants)
        return self.pools[Tier.HBM].num_pages - taken - len(stay) - promised

    def write(self, request: Request) -> None:
        """The request computes: all pages that are its own are written."""
        lease, way = request.given, self.way(request)
        request.written = {
            page: (way[at] if at < len(way) else "tail", self.next())
            for at, page in enumerate(lease.own.tolist(), lease.cached)
        }
        self.mover.contents[Tier.HBM].update(request.written)

    # --- laws ---

    def lost(self, path: Path) -> bool:
        return self.model.states(path) == (State.ABSENT, State.ABSENT)

    def check_given(self, tier: Tier, pages: set[int]) -> None:
        """Pages are about to be free: nobody reads or writes them (law 2)."""
        assert pages.isdisjoint(self.mover.touched(tier)), "a page is freed under a copy"
        if tier is Tier.HBM:
            for lease in self.manager.leases:
                if lease.state is LeaseState.READY:
                    assert pages.isdisjoint(lease.pages.tolist()), "a page is freed under a reader"
        self.mover.contents[tier].update(dict.fromkeys(pages, FREED))

    def check(self, step: Step) -> None:
        check_integrity(self.manager)
        step.started, self.mover.started = self.mover.started, []
        seen = look_at(self.manager.tree, self.paths)
        ways = {lease: seen.ways.get(lease.node, []) for lease in self.manager.leases}
        pinned = {p for lease, way in ways.items() for p in {*way} & {*self.ways.get(lease, ())}}
        self.ways = ways
        before = {tier: {*places} for tier, places in self.model.places.items()}
        pairs = {path: self.model.states(path) for path in before[Tier.HBM] | before[Tier.DRAM]}
        lost = self.model.go(step, seen, pinned)
        self.count("lost", {pairs[path] for path in lost if path in pairs})
        for tier in Tier:
            gone = before[tier] - self.model.places[tier].keys() - lost
            met = {pairs[path] for path in gone}
            self.count(f"leaves {tier.name}", {pair for pair in met if pair[tier] in READABLE})
        self.num_dropped += len(lost)
        self.check_lost(lost)
        self.check_programs()
        self.check_pages()
        self.check_leases()
        self.check_counters()

    def check_lost(self, lost: set[Path]) -> None:
        """While DRAM has room and copies go well, what a label speaks for is not lost."""
        mode = self.manager.mode
        if self.roomy and mode.offload and not mode.write_through:
            live = [p for p in self.programs.values() if p.label is not Label.INACTIVE]
            wanted = {path for program in live for path in program.wanted()}
            assert not (lost & wanted if mode.labels else lost)

    def check_programs(self) -> None:
        for name, program in self.programs.items():
            for held in program.held():
                held.paths = held.paths[: self.model.leading(held.paths, *Tier)]
            kept = [
                Kept(self.model.leading(one.paths, Tier.HBM), len(one.paths))
                for one in program.held()
            ]
            most = max((one.pages for one in kept), default=0)
            found = self.manager.kept(name)
            assert found.pages == most
            assert found in kept or found == Kept(0, 0)

    def check_pages(self) -> None:
        """Each page is free, in the tree, or one request's; what can be read is right."""
        out: dict[Tier, list[int]] = {
            tier: [place.page for place in places.values()]
            for tier, places in self.model.places.items()
        }
        for lease in self.manager.leases:
            out[Tier.HBM] += lease.own.tolist()
            for pages in lease.want.pages if lease.want is not None else ():
                out[Tier.HBM] += pages.tolist()
        for tier, pool in self.pools.items():
            assert sorted(out[tier]) == sorted(pool.out)
            assert pool.num_free == pool.num_pages - len(pool.out)
            for path, content in self.model.contents[tier].items():
                page = self.model.places[tier][path].page
                assert self.mover.contents[tier][page] == content

    def check_leases(self) -> None:
        hbm = self.mover.contents[Tier.HBM]
        for request in self.requests.values():
            lease, way = request.given, self.way(request)
            if lease.state is LeaseState.READY:
                pages = lease.pages.tolist()
                for path, page in zip(way[: lease.cached], pages, strict=False):
                    assert hbm[page] == self.model.contents[Tier.HBM][path]
                assert {*lease.own.tolist()} == request.written.keys()
                for page, content in request.written.items():
                    assert hbm[page] == content, "somebody wrote here"
                assert lease.want is not None or len(pages) == lease.num_pages
            assert lease.state is not LeaseState.FAILED or self.failing
        waiting = self.manager.room.waiting
        assert not (waiting and waiting[0].missing and self.pools[Tier.HBM].num_free)
        if not self.mover.moves:
            waits = [r for r in self.requests.values() if r.state not in ("ready", "failed")]
            assert not waits, "a request waits for nothing"
            assert not self.prefetches
            assert self.manager.leases.keys() == {r.given for r in self.requests.values()}

    def check_counters(self) -> None:
        """What came in went out or is here; a page is lost once, and counted once."""
        counters, moved = self.manager.counters, self.moved
        assert counters.loaded == moved[Direction.H2D, True]
        assert counters.load_failed == moved[Direction.H2D, False]
        assert counters.demoted + counters.written_back == moved[Direction.D2H, True]
        assert counters.write_failed == moved[Direction.D2H, False]
        assert [counters.hbm_hit, counters.dram_hit] == self.found
        assert counters.dropped == self.num_dropped
