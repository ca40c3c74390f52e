"""A small engine over a small cache, and a log of what it tells its client."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.sim.cache import LinkMover, WorkerCache
from kvtier.sim.cost import StepCost
from kvtier.sim.engine import Engine
from kvtier.sim.heap import EventHeap
from kvtier.sim.link import Link
from kvtier.sim.prompts import Prompts
from kvtier.sim.request import EngineRequest, EngineSettings
from kvtier.tiering.room import TierMode
from kvtier.transfer.link import CopyPath, LinkSpec

Group = tuple[str, int]
"""Name of a group, and tokens of its head that a prompt has."""

NO_OFFLOAD = TierMode(offload=False, write_through=False, labels=False)
WRITE_THROUGH = TierMode(offload=True, write_through=True, labels=False)
WRITE_BACK = TierMode(offload=True, write_through=False, labels=False)
LABELS = TierMode(offload=True, write_through=False, labels=True)
MODES = {
    "none": NO_OFFLOAD,
    "write-through": WRITE_THROUGH,
    "write-back": WRITE_BACK,
    "labels": LABELS,
}

KV_BYTES = 1000


class LinearCost(StepCost):
    """Step times that are easy to add up by hand, s: fixed, per new token, per pair of tokens."""

    def __init__(self, fixed_s: float = 0.01, token_s: float = 1e-4, pair_s: float = 1e-7) -> None:
        self.fixed_s, self.token_s, self.pair_s = fixed_s, token_s, pair_s

    def step_s(
        self, num_decoding: float, decode_tokens: float, chunk: float, position: float
    ) -> float:
        pairs = decode_tokens + chunk * (position + 0.5 * chunk)
        return self.fixed_s + self.token_s * (num_decoding + chunk) + self.pair_s * pairs


@dataclass
class EngineWorld:
    """`ask_at` schedules requests; `run` drains the heap. Times in s by request name."""

    hbm: int = 10_000
    dram: int = 0
    mode: TierMode = NO_OFFLOAD
    page: int = 1
    cost: StepCost = field(default_factory=LinearCost)
    settings: EngineSettings = field(
        default_factory=lambda: EngineSettings(chunk_tokens=100, max_running=8, reserve_tokens=0)
    )
    link_bytes_per_s: float = 1e9
    asked: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    check: bool = True

    def __post_init__(self) -> None:
        self.heap = EventHeap()
        one_way = self.link_bytes_per_s
        self.link = Link(self.heap, LinkSpec(CopyPath.STAGED, 1000, one_way, 1.6 * one_way))
        mover = LinkMover(self.link, KV_BYTES * self.page)
        prompts = Prompts(self.page)
        self.cache = WorkerCache(self.hbm, self.dram, self.mode, self.page, mover, prompts)
        self.engine = Engine(self.heap, self.cache, self.cost, self.settings)

    def ask_at(
        self,
        at_s: float,
        name: str,
        context: int,
        output: int,
        *,
        program: str | None = None,
        reused: int = 0,
        group: Group | None = None,
    ) -> None:
        shared, head = group if group is not None else (None, 0)
        request = EngineRequest(name, program or name, context, output, reused, shared, head)

        def first_token(now_s: float) -> None:
            assert name not in self.first, f"{name} had two first tokens"
            self.first[name] = now_s

        def finish(now_s: float) -> None:
            assert name not in self.ended, f"{name} ended twice"
            self.ended[name] = now_s

        def submit(now_s: float) -> None:
            self.asked[name] = now_s
            self.engine.submit(request)

        request.on_first_token, request.on_finish = first_token, finish
        self.requests[name] = request
        self.heap.at(at_s, submit)

    def run(self, until_s: float = float("inf")) -> None:
        while self.heap.step(until_s):
            if self.check:
                self.engine.check_integrity()
                assert self.engine.counters.busy_s <= self.heap.now_s + 1e-9
        if until_s == float("inf"):
            assert set(self.ended) == set(self.requests), "a request waits for ever"
            assert self.engine.num_running == 0
            assert self.cache.locked == 0

    def ttft_s(self, name: str) -> float:
        return self.first[name] - self.asked[name]
