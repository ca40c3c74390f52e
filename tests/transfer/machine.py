"""A state machine of all that can happen to transfer jobs, compared with its model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.job import Priority

from .driver import EFFECTIVE, Driver
from .model import How, Moved, Phase, urgency
from .scene import Copy, pattern


def index(choose: Random) -> dict[str, Any]:
    return {"index": choose.randrange(1000)}


def side(choose: Random) -> dict[str, Any]:
    return {"on_device": choose.random() < 0.5}


def urgent(choose: Random) -> dict[str, Any]:
    return {
        "priority": choose.choice([*Priority]),
        "deadline_s": choose.choice((None, None, 1.0, 5.0)),
    }


def pages(choose: Random) -> dict[str, Any]:
    return side(choose) | {"num_pages": choose.choice((1, 2, 4, 8))}


def job(choose: Random) -> dict[str, Any]:
    return index(choose) | {"how": How(**urgent(choose), layerwise=choose.random() < 0.4)}


OPERATIONS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "fill_pages": pages,
    "drop_copy": index,
    "rewrite": index,
    "copy_job": lambda c: job(c) | {"after": c.choices(range(1000), k=c.choice((0, 0, 0, 1, 2)))},
    "same_source": job,
    "chain": lambda c: job(c) | {"other": c.randrange(1000)},
    "make_room": lambda c: (
        job(c) | {"num_named": c.choice((0, 1, 9, 9)), "by_heirs": c.random() < 0.5}
    ),
    "shared_page": lambda c: index(c) | {"way": c.randrange(3), "other": c.randrange(1000)},
    "out_of_range": lambda c: index(c) | {"page": c.choice((-1, 99, 1 << 31))},
    "cancel": index,
    "raise_priority": lambda c: index(c) | urgent(c),
    "let_one": index,
    "let_some": lambda c: {"direction": c.choice([*Direction])},
    "poll": lambda c: {},
    "wait": index,
    "result": index,
    "close": lambda c: {},
}
NEEDS = {
    **dict.fromkeys(("drop_copy", "rewrite", "copy_job", "make_room", "out_of_range"), "copies"),
    **dict.fromkeys(("cancel", "raise_priority", "wait", "result"), "jobs"),
    **dict.fromkeys(("same_source", "chain", "shared_page"), "jobs"),
}
"""What must not be empty."""
MAY_CHANGE_NOTHING = ("out_of_range", "cancel", "raise_priority", "wait", "result")
"""They run even so, and must change nothing; the others had nothing to do."""
OFTEN = (
    *("copy_job",) * 12,
    *("let_one",) * 12,
    *("chain",) * 4,
    *("same_source",) * 3,
    *("make_room",) * 6,
    *("shared_page",) * 3,
    *("drop_copy",) * 3,
    *("fill_pages",) * 3,
    *("poll",) * 2,
    *("cancel", "raise_priority"),
)


RARE = (Phase.BETWEEN, Phase.FAILING)
"""Phases that are soon over."""
ON_RARE = (
    *("cancel", "raise_priority", "wait", "result", "same_source", "copy_job", "make_room"),
    *("chain",) * 4,
    "close",
    *("shared_page",) * 3,
)


class Machine(Driver):
    # Arguments come from a seed, as in the tree's machine: hypothesis varies few examples in many
    # ways, and of many rules it would leave out most in each run.
    @rule(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 40))
    def walk(self, seed: int, count: int) -> None:
        choose = Random(seed)
        for _ in range(count):
            operation = choose.choice([*OPERATIONS, *OFTEN])
            self.rare_first = choose.random() < 0.4 and any(m.phase in RARE for m in self.jobs)
            if self.rare_first:
                operation = choose.choice(ON_RARE)
            if operation == "close" and not self.rare_first and choose.random() < 0.7:
                operation = "let_some"  # a new engine has no jobs to meet
            arguments = OPERATIONS[operation](choose)
            if operation not in NEEDS or getattr(self, NEEDS[operation]):
                self.now_s += choose.random()
                note(f"{operation} {arguments}")
                effective = getattr(self, operation)(**arguments)
                EFFECTIVE[operation] += effective
                if effective or operation in MAY_CHANGE_NOTHING:
                    self.compare()

    @property
    def jobs(self) -> list[Moved]:
        return self.model.jobs

    def some_job(self, index: int) -> Moved:
        return self.by_phase(self.jobs, index)

    def by_phase(self, jobs: list[Moved], index: int) -> Moved:
        """Each phase as often as others, or one that is rare."""
        if self.rare_first:
            jobs = [moved for moved in jobs if moved.phase in RARE] or jobs
        place, at = divmod(index, len(phases := sorted({m.phase.value for m in jobs})))
        met = [moved for moved in jobs if moved.phase.value == phases[at]]
        return met[place % len(met)]

    # --- owners of pages; each returns whether it did anything ---

    def fill_pages(self, on_device: bool, num_pages: int) -> bool:
        return self.fill(self.pools.device if on_device else self.pools.host, num_pages)

    def drop_copy(self, index: int) -> bool:
        copy = self.copies[index % len(self.copies)]
        if self.busy(copy):
            return False
        self.drop(copy)
        return True

    def rewrite(self, index: int) -> bool:
        """The owner writes a new generation where no live job reads."""
        copy = self.copies[index % len(self.copies)]
        if self.busy(copy):
            return False
        copy.content = pattern(self.next_owner, 1, len(copy.pages))
        self.next_owner += 1
        copy.side.write(copy.pages, copy.content)
        return True

    # --- jobs ---

    def copy_job(self, index: int, after: list[int], how: How) -> bool:
        """To fresh pages on the other side, perhaps after some earlier jobs, live or not."""
        copy = self.copies[index % len(self.copies)]
        earlier = list(dict.fromkeys(self.some_job(i) for i in after)) if self.jobs else []
        return self.to_fresh_pages(copy, earlier, how)

    def same_source(self, index: int, how: How) -> bool:
        """A second job reads what a first one reads."""
        first = self.by_phase(self.model.live() or self.jobs, index)
        copy = next((c for c in self.copies if c.pages is first.sources), None)
        return copy is not None and self.to_fresh_pages(copy, [], how)

    def chain(self, index: int, other: int, how: How) -> bool:
        """What one job brings, a later one takes back to where it came from."""
        first = self.some_job(index)
        there = self.pools.target(first.direction)
        brought: Copy | None = Copy(first.copy.owner, there, first.targets, first.content)
        if not first.live:
            brought = next((c for c in self.copies if c.pages is first.targets), None)
        if brought is None:
            return False
        return self.to_fresh_pages(brought, [first, self.some_job(other)], how)

    def to_fresh_pages(self, copy: Copy, after: list[Moved], how: How) -> bool:
        up = copy.side is self.pools.host
        how = how._replace(layerwise=how.layerwise and up)
        other_side = self.pools.device if up else self.pools.host
        targets = other_side.pages.take(len(copy.pages))
        if targets is None:
            return False
        self.random.shuffle(ids := targets.tolist())
        if self.submit(copy, ids, after, how) is None:
            other_side.pages.give(ids)
        return True

    def make_room(self, index: int, num_named: int, by_heirs: bool, how: How) -> bool:
        """Up into pages that earlier jobs are still reading: refused unless all are named.

        `by_heirs` names jobs that come after those instead, where there are some.
        """
        down = self.model.live(Direction.D2H)
        read = self.by_phase(down, index).sources if down else []
        victims = [c for c in self.copies if c.pages is read]
        copies = [c for c in self.copies if c.side is self.pools.host]
        if not victims or not copies:
            return False
        room_of, copy = victims[0], copies[index % len(copies)]
        fresh = self.pools.device.pages.take(max(0, len(copy.pages) - len(room_of.pages)))
        if fresh is None:
            return False
        readers = [moved for moved in down if {*moved.sources} & {*room_of.pages}]
        targets = (room_of.pages + fresh.tolist())[: len(copy.pages)]
        named = readers[:num_named]
        if by_heirs:
            live = self.model.live()
            heirs = [next((m for m in live if reader in m.after), reader) for reader in named]
            named = list(dict.fromkeys(heirs))
        moved = self.submit(copy, targets, named, how, room_of)
        if moved is None:
            self.pools.device.pages.give(fresh)
        return True

    def shared_page(self, index: int, way: int, other: int) -> bool:
        """A page that a live job reads is written, or one that it writes is read or written."""
        live = self.model.live()
        if not live:
            return False
        first = self.by_phase(live, index)
        reads, writes = self.pools.source(first.direction), self.pools.target(first.direction)
        elsewhere = [c for c in self.copies if c.side is (writes if way == 2 else reads)]
        if way != 0 and not elsewhere:
            return False
        if way == 0:  # read what it writes
            copy = Copy(first.copy.owner, writes, first.targets, first.content)
            taken = reads.pages.take(len(copy.pages))
            if taken is None:
                return False
            targets, back = taken.tolist(), taken.tolist()
        else:  # write what it writes, or what it reads
            copy = elsewhere[other % len(elsewhere)]
            wanted = first.targets if way == 1 else first.sources
            num_pages = min(len(wanted), len(copy.pages))
            copy = Copy(copy.owner, copy.side, copy.pages[:num_pages], copy.content[:num_pages])
            targets, back = wanted[:num_pages], []
        assert self.submit(copy, targets, [], How()) is None
        (reads if way == 0 else writes).pages.give(back)
        return True

    def out_of_range(self, index: int, page: int) -> bool:
        copy = self.copies[index % len(self.copies)]
        direction = Direction.D2H if copy.side is self.pools.device else Direction.H2D
        first, wrong = copy.pages[:1], [page]
        for sources, targets in ((first, wrong), (wrong, first)):
            with pytest.raises(TransferError, match=r"^[^\n]*outside[^\n]*$"):
                self.engine.submit(direction, sources, targets)
        return False

    # --- what happens to jobs ---

    def cancel(self, index: int) -> bool:
        moved = self.some_job(index)
        self.hit("cancel", [moved])
        may = moved.live and not moved.failed
        changes = may and not moved.cancelled
        moved.cancelled |= may
        self.model.settle()
        assert self.engine.cancel(self.job_of(moved)) is may
        return changes

    def raise_priority(self, index: int, priority: Priority, deadline_s: float | None) -> bool:
        moved = self.some_job(index)
        self.hit("raise priority", [moved])
        before = moved.urgency
        if moved.live:
            moved.hasten(urgency(priority, deadline_s))
        self.engine.raise_priority(self.job_of(moved), priority, deadline_s)
        return moved.urgency < before

    def let_one(self, index: int) -> bool:
        """A chunk in flight, any of them, ends."""
        if self.gate.waiting:
            self.gate.let(index % len(self.gate.waiting))
            return True
        return False

    def let_some(self, direction: Direction) -> bool:
        """All chunks of a direction end, one right after the other."""
        chunks = [chunk for chunk, _ in self.gate.waiting]
        chosen = [at for at, chunk in enumerate(chunks) if chunk.direction is direction]
        self.gate.let(*chosen)
        return bool(chosen)

    def poll(self) -> bool:
        unreported = [moved for moved in self.jobs if not moved.polled]
        self.hit("poll", unreported)
        ended = [moved.job for moved in unreported if not moved.live]
        found = self.engine.poll()
        assert sorted(job.id for job in found) == sorted(job.id for job in ended if job)
        for moved in unreported:
            moved.polled = not moved.live
        return bool(ended)

    def wait(self, index: int) -> bool:
        moved = self.some_job(index)
        self.hit("wait", [moved])
        assert self.engine.wait([self.job_of(moved)], 0) is not moved.live
        return False

    def result(self, index: int) -> bool:
        moved = self.some_job(index)
        self.hit("result", [moved])
        job = self.job_of(moved)
        assert job.future.cancel() is False
        if moved.over is Phase.DONE:
            assert job.future.result(0) is None
            assert job.error is None
        elif moved.over is Phase.FAILED:
            with pytest.raises(TransferError, match=r"^[^\n]+$") as raised:
                job.future.result(0)
            assert raised.value is job.error
        else:
            ending = TimeoutError if moved.live else CancelledError
            with pytest.raises(ending):
                job.future.result(0)
        return False

    def close(self) -> bool:
        """With work left: what is in flight ends, the rest is cancelled; then a new engine."""
        self.hit("close", self.jobs)
        closer = Thread(target=self.engine.close)
        live = self.model.live()
        for moved in live:  # one after the other: a job fails with the one that it came after
            moved.cancelled |= moved.live and not moved.failed
            self.model.settle()
        closer.start()
        self.wait_until_closed()
        while self.gate.waiting:
            assert closer.is_alive(), "closed with chunks in flight"
            self.gate.let(0)
        closer.join()
        assert not self.model.live()
        self.look()
        self.compare_counters()
        self.poll()
        self.engine.close()
        self.fill_engine()
        return bool(live)

    def wait_until_closed(self) -> None:
        """It says so first, and then waits."""
        message = "outside"
        while "outside" in message:
            with pytest.raises(TransferError) as raised:
                self.engine.submit(Direction.D2H, [1 << 20], [0])
            message = str(raised.value)
        assert "closed" in message

    @invariant()
    def at_rest(self) -> None:
        self.compare()
        self.pools.compare_gaps()
