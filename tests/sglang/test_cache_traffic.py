"""Requests in all phases, commands and evictions in any order: nothing is lost, leaked or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Demote,
    LevelsQuestion,
    Pin,
    Promote,
    Release,
    SetLabel,
    Unpin,
)

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache

EXAMPLES = 120
COMMANDS: dict[str, Callable[[str, int], AnyCommand]] = {
    "demote": Demote,
    "promote": Promote,
    "pin": Pin,
    "unpin": Unpin,
    "release": Release,
    "busy": lambda program, epoch: SetLabel(program, epoch, Label.BUSY),
    "idle": lambda program, epoch: SetLabel(program, epoch, Label.IDLE),
    "inactive": lambda program, epoch: SetLabel(program, epoch, Label.INACTIVE),
}
PROGRAM = st.sampled_from("pqr")
SYMBOLS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
LABEL = st.none() | st.sampled_from([label.value for label in Label])
INDEX = st.integers(0, 7)
ARRIVE = st.tuples(st.just("arrive"), PROGRAM, SYMBOLS, LABEL)
WHOLE = st.tuples(st.just("serve"), PROGRAM, SYMBOLS, LABEL)
STEP = st.one_of(
    ARRIVE,
    WHOLE,
    WHOLE,
    st.tuples(st.sampled_from(("admit", "admit_in_part")), INDEX),
    st.tuples(st.sampled_from(("go_on", "go_on", "end", "abort", "retract", "drop")), INDEX),
    st.tuples(st.just("command"), st.sampled_from(sorted(COMMANDS)), PROGRAM),
    st.tuples(st.just("evict"), st.sampled_from(("hbm", "dram")), st.integers(1, 8)),
    st.tuples(st.just("tick"), st.integers(0, 40)),
    st.tuples(st.just("tick"), st.just(0)),
)


class Traffic:
    """SGLang's scheduler and a control client, with what is in the engine now."""

    def __init__(self, policy: str, page_size: int, dram: int) -> None:
        self.live = LiveCache(policy, page_size, hbm=16, dram=dram)
        self.waiting: list[Req] = []
        self.computing: list[Req] = []  # not published yet
        self.published: list[Req] = []

    def tokens(self, symbols: Sequence[int]) -> tuple[int, ...]:
        """A page of each symbol, and one token more."""
        return (*(s for s in symbols for _ in range(self.live.page_size)), 5)

    def fits(self, req: Req) -> bool:
        """Whether the rest of the request and a page more has room beside all that is locked."""
        lock = self.live.cache.lock(req.last_node)
        size = self.live.page_size
        wanted = -(-len(req.full_untruncated_fill_ids) // size) * size - req.prefix_len + size
        room = self.live.allocator.available_size() + self.live.cache.evictable_size()
        self.live.cache.unlock(lock)
        return wanted <= room and self.live.rows.available_size() > 0

    def serve(self, program: str, symbols: list[int], label: str | None) -> None:
        self.arrive(program, symbols, label)
        req = self.waiting[-1]
        if not self.fits(req):
            self.live.abort_waiting(self.waiting.pop())
            return
        self.live.publish(self.live.admit(self.waiting.pop()))
        self.live.end(req)

    def arrive(self, program: str, symbols: list[int], label: str | None) -> None:
        self.waiting.append(self.live.request(self.tokens(symbols), program, label))
        self.live.look_up(self.waiting[-1])

    def admit(self, index: int, part: bool = False) -> None:
        if not self.waiting:
            return
        req = self.live.look_up(self.waiting[index % len(self.waiting)])
        if self.fits(req):
            self.waiting.remove(req)
            matched = req.prefix_len + req.host_hit_length
            self.live.admit(req, end=matched + 1 if part else None)
            self.computing.append(req)

    def admit_in_part(self, index: int) -> None:
        self.admit(index, part=True)

    def go_on(self, index: int) -> None:
        """A computed chunk is published; then the rest follows, or a token is decoded."""
        if self.computing:
            req = self.computing.pop(index % len(self.computing))
            self.published.append(self.live.publish(req))
        elif self.published:
            req = self.published[index % len(self.published)]
            room = self.live.allocator.available_size() + self.live.cache.evictable_size()
            rest = len(req.full_untruncated_fill_ids) - req.kv.kv_allocated_len
            if room < rest + 2 * self.live.page_size:
                return
            if rest > 0:
                self.live.next_chunk(req)
            else:
                self.live.decode(req, (7,))

    def end(self, index: int) -> None:
        if self.published:
            req = self.published.pop(index % len(self.published))
            whole = req.kv.kv_allocated_len >= len(req.origin_input_ids)
            self.live.end(req) if whole else self.live.abort_in_prefill(req)

    def abort(self, index: int) -> None:
        """As SGLang does in the phase that the request is in."""
        places = (self.waiting, self.computing, self.published)
        if not any(places):
            return
        every = [(place, req) for place in places for req in place]
        place, req = every[index % len(every)]
        place.remove(req)
        if place is self.waiting:
            self.live.abort_waiting(req)
        elif place is self.computing:
            self.live.abort_in_prefill(req)
        else:
            self.live.end(req, aborted=True, checkpoint=req.kv.kv_allocated_len == req.extend_end)

    def retract(self, index: int) -> None:
        if self.published:
            req = self.published.pop(index % len(self.published))
            self.live.retract(req)
            self.waiting.append(self.live.look_up(req))

    def drop(self, index: int) -> None:
        """The request vanishes from the queue without a word."""
        if self.waiting:
            self.waiting.pop(index % len(self.waiting))

    def command(self, kind: str, program: str) -> None:
        event(f"{kind} {self.live.execute(COMMANDS[kind](program, 1)).status}")

    def evict(self, tier: str, pages: int) -> None:
        evict = self.live.evict if tier == "hbm" else self.live.cache.evict_host
        evict(pages * self.live.page_size)

    def tick(self, seconds: int) -> None:
        self.live.now_s += seconds
        self.live.tick()

    def settle(self) -> None:
        """All requests end, all copies arrive, all pins run out."""
        while self.waiting or self.computing or self.published:
            self.abort(0)
        self.tick(100)
        self.tick(0)

    def check(self) -> None:
        self.live.check()
        levels = self.live.cache.worker.answer(LevelsQuestion())
        for level in (levels.hbm, levels.dram):
            parts = (level.free, level.evictable, level.protected, level.in_flight)
            assert min(parts) >= 0
            assert sum(parts) == level.capacity


@pytest.mark.timeout(400)  # finding the shortest way to a failure takes minutes
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", [WRITE_THROUGH, WRITE_BACK])
def test_sums_holders_and_bytes_are_right_after_every_step(policy: str, page_size: int) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, phases=(Phase.generate, Phase.shrink))
    @given(st.sampled_from((4, 8, 16, 32)), st.lists(STEP, min_size=10, max_size=40))
    def run(dram: int, steps: list[tuple[Any, ...]]) -> None:
        traffic = Traffic(policy, page_size, dram)
        with closing(traffic.live):
            for name, *arguments in steps:
                getattr(traffic, name)(*arguments)
                traffic.check()
            traffic.settle()
            traffic.live.check_idle()

    run()
