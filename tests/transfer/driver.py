"""An engine over real pools and the model of it, driven with the same jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from threading import RLock

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.faults import FaultyBackend
from kvtier.transfer.fixed_window import FixedWindow
from kvtier.transfer.job import Chunk, Job
from kvtier.transfer.window import TransferWindow, Window, WindowSettings

from .gate import Gate
from .model import ENDED, LIVE, STATES, Cell, How, Model, Moved, Phase
from .scene import LAYERS, PAGE_BYTES, ROWS, SEGMENTS, Copy, Pools, Side, pattern

COVERED: Counter[tuple[str, Phase]] = Counter()
"""How often an operation met a job in this phase."""
EFFECTIVE: Counter[str] = Counter()
"""Operations that changed something, or jobs that were refused for a page of another one."""

_KEPT = 12
"""Ended jobs that are remembered: later ones may come after them, or be cancelled again."""


class Counters:
    """The engine's metrics by direction and name, with the outcome where there is one."""

    def __init__(self, engine: TransferEngine) -> None:
        self.values: dict[tuple[str, str], float] = {}
        for name, labels, value in engine.metrics():
            known = dict(labels)
            short = name.removeprefix("kvtier_transfer_")
            full = f"{short} {known['outcome']}" if "outcome" in known else short
            self.values[known["direction"], full] = value

    def __getitem__(self, key: tuple[str, str]) -> float:
        return self.values[key]

    def sum(self, name: str) -> float:
        return sum(self.values[direction, name] for direction in Direction)


class Driver(RuleBasedStateMachine):
    """Does the same to an engine and to its model, and compares what both say."""

    @initialize(seed=st.integers(0, 2**64 - 1))
    def start(self, seed: int) -> None:
        self.random = choose = Random(seed)
        pages = choose.choice(((3, 3), (12, 24), (24, 12), (30, 30)))
        self.chunk_bytes = choose.choice((1, 1, 2, 3)) * PAGE_BYTES
        self.window = choose.choice(("tiny", "chunk", "chunks", "chunks", "aimd", "none"))
        self.failure_rate = choose.choice((0.01, 0.3))
        note(f"{pages=} {self.chunk_bytes=} {self.window=} {self.failure_rate=}")
        self.pools = Pools(*pages)
        self.model = Model()
        self.copies: list[Copy] = []
        self.next_owner = self.next_number = 0
        self.now_s = 0.0
        self.lock = RLock()
        """Of the model, against the thread that copies; there is one at a time."""
        self.fill_engine()
        for side in (self.pools.device, self.pools.host):
            while 2 * side.pages.num_free > side.pages.num_pages:
                self.fill(side, min(self.random.randrange(1, 9), side.pages.num_free))

    def fill_engine(self) -> None:
        """A new engine on the same pools."""
        copy = CpuCopy(num_threads=1)
        inner = CpuBackend(self.pools.device_pool, self.pools.host_pool, copy)
        faulty = FaultyBackend(
            inner, failure_rate=self.failure_rate, seed=self.random.randrange(2**32)
        )
        self.gate = Gate(faulty, self.chunk_started, self.chunk_ended)
        self.windows = {direction: self.new_window() for direction in Direction}
        self.engine = TransferEngine(
            self.gate, chunk_bytes=self.chunk_bytes, windows=self.windows, clock=self.clock
        )
        self.model.jobs.clear()
        self.model.ends = dict.fromkeys(ENDED, 0)
        self.num_submitted = 0

    def new_window(self) -> Window:
        sizes = {"tiny": 1, "chunk": self.chunk_bytes, "chunks": 3 * self.chunk_bytes}
        if self.window in sizes:
            return FixedWindow(sizes[self.window])
        if self.window == "aimd":
            return TransferWindow(WindowSettings(self.chunk_bytes, max_chunks=4, epoch_chunks=2))
        return FixedWindow()

    def clock(self) -> float:
        return self.now_s

    def teardown(self) -> None:
        if hasattr(self, "gate"):
            self.gate.open_wide()
            self.engine.close()
            self.pools.close()

    # --- what happens in the engine's threads ---

    def chunk_started(self, chunk: Chunk) -> None:
        with self.lock:
            self.note_start(chunk)

    def chunk_ended(self, chunk: Chunk, error: Exception | None) -> None:
        with self.lock:
            self.note_end(chunk, error)

    def note_start(self, chunk: Chunk) -> None:
        moved = next(m for m in self.model.jobs if self.is_of(chunk, m))
        assert moved.may_go_on, f"a chunk of a job that is {moved.phase}"
        # Priority and deadline count between chunks; equal ones take turns.
        first = self.model.first(chunk.direction)
        assert moved.urgency == first.urgency, f"{chunk.job}: {moved.urgency}, before {first}"
        self.check_window(moved, chunk)
        assert chunk.num_bytes <= self.chunk_bytes
        cells = moved.cells_of(chunk.target_pages.tolist(), self.segments_of(chunk))
        sources = [moved.sources[row] for row, _ in cells[:: chunk.num_segments]]
        assert chunk.source_pages.tolist() == sources
        assert chunk.num_bytes == self.bytes_of(cells)
        moved.turn(cells, Cell.UNTOUCHED, Cell.IN_FLIGHT)
        self.mark(moved, cells, valid=False)

    def note_end(self, chunk: Chunk, error: Exception | None) -> None:
        moved = next(m for m in self.model.jobs if self.is_of(chunk, m))
        self.hit("chunk fails" if error else "chunk ends", [moved])
        cells = moved.cells_of(chunk.target_pages.tolist(), self.segments_of(chunk))
        moved.turn(cells, Cell.IN_FLIGHT, Cell.LOST if error else Cell.MOVED)
        moved.failed |= error is not None and not moved.cancelled
        if error is None:
            self.mark(moved, cells, valid=True)
        self.model.settle()

    def check_window(self, moved: Moved, chunk: Chunk) -> None:
        """Never more in flight than the window, save what an urgent job waits for, or one chunk."""
        window, in_flight = self.windows[chunk.direction], self.in_flight(chunk.direction)
        if moved.urgency.held and in_flight:
            assert isinstance(window, FixedWindow | TransferWindow)
            most = window.size_bytes
            if isinstance(window, TransferWindow):  # an urgent page under way may be beside it
                most += int(window.settings.slack * window.settings.chunk_bytes)
            assert in_flight + chunk.num_bytes <= most

    @staticmethod
    def is_of(chunk: Chunk, moved: Moved) -> bool:
        """Found by its pages alone: they are in one live job, or in jobs one after the other."""
        same = moved.live and chunk.direction is moved.direction
        return same and {*chunk.target_pages.tolist()} <= {*moved.targets} and not moved.blocked

    @staticmethod
    def segments_of(chunk: Chunk) -> range:
        return range(chunk.first_segment, chunk.first_segment + chunk.num_segments)

    @staticmethod
    def bytes_of(cells: Iterable[tuple[int, int]]) -> int:
        return sum(ROWS[segment] for _, segment in cells)

    def mark(self, moved: Moved, cells: list[tuple[int, int]], *, valid: bool) -> None:
        side = self.pools.target(moved.direction)
        for row, segment in cells:
            columns = slice(sum(ROWS[:segment]), sum(ROWS[: segment + 1]))
            page = moved.targets[row]
            side.valid[page, columns] = valid
            if valid:
                side.expected[page, columns] = moved.content[row, columns]

    # --- what operations share ---

    def hit(self, operation: str, jobs: Iterable[Moved]) -> None:
        for phase in {moved.phase for moved in jobs}:
            COVERED[operation, phase] += 1

    def in_flight(self, direction: Direction) -> int:
        live = self.model.live(direction)
        return sum(self.bytes_of(moved.cells_in(Cell.IN_FLIGHT)) for moved in live)

    def some_side(self) -> Side:
        return self.random.choice((self.pools.device, self.pools.host))

    def busy(self, copy: Copy) -> bool:
        """Whether a live job has to do with its pages."""
        down = copy.side is self.pools.device
        used = [
            moved.sources if down == (moved.direction is Direction.D2H) else moved.targets
            for moved in self.model.live()
        ]
        return any({*pages} & {*copy.pages} for pages in used)

    def fill(self, side: Side, num_pages: int) -> bool:
        """A new owner writes its pages: bytes of an owner and a generation that nobody else has."""
        pages = side.pages.take(num_pages)
        if pages is None:
            return False
        content = pattern(self.next_owner, 0, num_pages)
        self.copies.append(Copy(self.next_owner, side, pages.tolist(), content))
        self.next_owner += 1
        side.write(pages.tolist(), content)
        return True

    def drop(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.side.pages.give(copy.pages)

    def submit(
        self,
        copy: Copy,
        targets: list[int],
        after: list[Moved],
        how: How,
        room_of: Copy | None = None,
    ) -> Moved | None:
        """None, with nothing changed, where the engine must refuse it and did.

        `room_of` is a copy whose pages it takes; they count as the job's from here on.
        """
        way = Direction.D2H if copy.side is self.pools.device else Direction.H2D
        new = Moved(self.next_number, way, copy, targets, after, how, len(ROWS), room_of)
        self.note_neighbours(new)
        earlier = [self.job_of(moved) for moved in after]

        def submit() -> Job:
            return self.engine.submit(way, new.sources, targets, after=earlier, **how._asdict())

        if self.model.conflict(new):
            with pytest.raises(TransferError, match=r"^[^\n]* page \d+ [^\n]*$"):
                submit()
            return None
        self.accept(new)  # its first chunk may begin before `submit` is back
        new.job = submit()
        return new

    def accept(self, new: Moved) -> None:
        self.model.jobs.append(new)
        self.hit("come after", new.after)
        self.hit("hurry", [m for m in new.after if m.live and new.urgency < m.urgency])
        self.next_number += 1
        self.num_submitted += 1
        if new.room_of is not None:
            self.copies.remove(new.room_of)
        self.model.settle()
        if new.live:  # else it failed with what it came after, and hurries nobody
            new.hasten(new.urgency)

    def note_neighbours(self, new: Moved) -> None:
        """Which jobs, live or ended, had to do with the same pages."""
        for other in self.model.jobs:
            same = new.direction is other.direction
            theirs = (other.sources, other.targets) if same else (other.targets, other.sources)
            for mine, verb in ((new.sources, "read"), (new.targets, "write")):
                if {*mine} & {*theirs[verb == "write"]}:
                    what = "source" if same == (verb == "read") else "target"
                    self.hit(f"{verb} its {what}", [other])

    @staticmethod
    def job_of(moved: Moved) -> Job:
        assert moved.job is not None
        return moved.job

    # --- after every operation ---

    def look(self) -> None:
        """What the engine says of each job; ended ones hand over or give back their pages."""
        if self.gate.wrong:
            raise self.gate.wrong[0]
        for moved in self.model.jobs:
            job = self.job_of(moved)
            assert job.state is STATES[moved.phase], f"{job} is {moved.phase}"
            assert job.pages_done == moved.pages_moved()
            assert job.future.done() is not moved.live
            if job.layers is not None:
                ready = [job.layers.layer_ready(layer) for layer in range(len(LAYERS))]
                lost = moved.over in (Phase.FAILED, Phase.CANCELLED)
                assert ready == [not lost and moved.has_moved(layer) for layer in SEGMENTS]
            if not moved.live and not moved.settled:
                self.take_over(moved)
        over = [m for m in self.model.jobs if not m.live and m.polled]
        for moved in over[:-_KEPT]:
            self.model.jobs.remove(moved)

    def take_over(self, moved: Moved) -> None:
        """DONE: all its bytes are there, and the copy counts. Else it published nothing."""
        side, moved.settled = self.pools.target(moved.direction), True
        room_of = moved.room_of
        if moved.over is Phase.DONE:
            assert (side.read(moved.targets) == moved.content).all()
            self.copies.append(Copy(moved.copy.owner, side, moved.targets, moved.content))
        elif room_of is not None and moved.untouched:
            self.copies.append(room_of)
            side.pages.give([page for page in moved.targets if page not in room_of.pages])
            return
        else:
            side.pages.give(moved.targets)
        side.pages.give(self.left_over(moved))

    @staticmethod
    def left_over(moved: Moved) -> list[int]:
        """Pages of the copy that made room for the job, beyond those that it needs."""
        pages = [] if moved.room_of is None else moved.room_of.pages
        return [page for page in pages if page not in moved.targets]

    def compare(self) -> None:
        self.look()
        self.engine.check_integrity()
        self.pools.compare()
        self.compare_pages()
        self.compare_counters()
        self.check_alive()

    def compare_pages(self) -> None:
        """Law 1: free + held + in flight = capacity, each page once."""
        for side in (self.pools.device, self.pools.host):
            side.pages.check_integrity()
            held = [page for copy in self.copies if copy.side is side for page in copy.pages]
            held += [
                page
                for moved in self.model.live()
                if self.pools.target(moved.direction) is side
                for page in moved.targets + self.left_over(moved)
            ]
            assert len(held) == len({*held}) == side.pages.num_taken
            assert side.pages.num_free + len(held) == side.pages.num_pages

    def compare_counters(self) -> None:
        counters = Counters(self.engine)
        for direction in Direction:
            live = self.model.live(direction)
            stopped = [m for m in live if m.cancelled or m.failed]
            left = [m.cells_in(Cell.UNTOUCHED) for m in live if m not in stopped]
            assert counters[direction, "in_flight_bytes"] == self.in_flight(direction)
            assert counters[direction, "queued_bytes"] == sum(map(self.bytes_of, left))
            assert counters[direction, "live_jobs"] == len(live)
        for phase, name in zip(ENDED, ("done", "failed", "cancelled"), strict=True):
            assert counters.sum(f"jobs_total {name}") == self.model.ends[phase]
        ended = sum(self.model.ends.values())
        assert self.num_submitted == ended + counters.sum("live_jobs")

    def check_alive(self) -> None:
        """No deadlock, in no state: a direction with a job that may go on has a chunk in flight."""
        for direction in Direction:
            if any(moved.may_go_on for moved in self.model.live(direction)):
                assert self.in_flight(direction), f"{direction} stands still"
        if self.model.live():
            assert any(moved.phase in LIVE for moved in self.model.live())
            assert self.gate.waiting
