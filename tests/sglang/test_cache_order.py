"""The order in which pages leave both tiers of a real cache, against a model of the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import Release, SetLabel

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache, path_of, rank

POLICIES = (WRITE_THROUGH, WRITE_BACK)
Path = tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """A node of the tree; its children are those that name it as parent."""

    id: int
    parent: int
    tokens: int
    rank: int
    used: float
    hbm: bool
    dram: bool


Items = dict[int, Item]


def children(items: Items, item: Item) -> list[Item]:
    return [other for other in items.values() if other.parent == item.id]


def first_out_of_hbm(items: Items) -> Item | None:
    leaves = [i for i in items.values() if i.hbm and not any(c.hbm for c in children(items, i))]
    return min(leaves, key=lambda i: (i.rank, i.used, i.id), default=None)


def dram_class(item: Item) -> int:
    """INACTIVE, any duplicate, BUSY sole copies, IDLE sole copies."""
    if item.rank == rank(Label.INACTIVE):
        return 0
    if item.hbm:
        return 1
    return 2 if item.rank == rank(Label.BUSY) else 3


def first_out_of_dram(items: Items, policy: str) -> Item | None:
    def may_go(item: Item) -> bool:
        below = children(items, item)
        if not item.dram or (below and not item.hbm):
            return False
        return policy == WRITE_BACK or not any(child.dram for child in below)

    able = [item for item in items.values() if may_go(item)]
    return min(able, key=lambda i: (dram_class(i), i.used, i.id), default=None)


def without_hbm(items: Items, victim: Item, policy: str) -> Items:
    """Write-back copies what leaves HBM; write-through deletes what it has no copy of."""
    if policy == WRITE_BACK or victim.dram:
        return items | {victim.id: replace(victim, hbm=False, dram=True)}
    assert not children(items, victim)
    return {key: item for key, item in items.items() if key != victim.id}


def without_dram(items: Items, victim: Item, policy: str) -> Items:
    if victim.hbm:
        return items | {victim.id: replace(victim, dram=False)}
    return {key: item for key, item in items.items() if key != victim.id}


@dataclass
class World:
    """A cache with programs; `held` is what each program's last prompt still has in the tree."""

    policy: str
    page_size: int
    hbm: int = 256
    dram: int = 256
    held: dict[str, Path] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.live = LiveCache(self.policy, self.page_size, self.hbm, self.dram)

    def tokens(self, symbols: Sequence[int]) -> Path:
        """A page of each symbol."""
        return tuple(symbol for symbol in symbols for _ in range(self.page_size))

    def serve(self, program: str, symbols: Sequence[int], label: Label | None) -> None:
        self.live.serve(self.tokens(symbols), program, label)
        if label is not None or program in self.released or program not in self.labels:
            self.labels[program] = label or Label.BUSY
        self.released.discard(program)
        self.held[program] = self.tokens(symbols)

    def access(self, symbols: Sequence[int]) -> None:
        self.live.hits(self.tokens(symbols))

    def relabel(self, program: str, label: Label) -> None:
        self.live.execute(SetLabel(program, 0, label))
        self.labels[program] = label
        self.released.discard(program)

    def release(self, program: str) -> None:
        if program in self.labels:
            self.live.execute(Release(program, 0))
            self.labels[program] = Label.INACTIVE
            self.released.add(program)
            self.held.pop(program, None)

    def items(self) -> Items:
        found = {}
        for node in self.live.nodes():
            path = path_of(node)
            holders = [rank(self.labels[p]) for p, h in self.held.items() if path == h[: len(path)]]
            found[node.id] = Item(
                node.id,
                node.parent.id,
                len(node.key),
                max(holders, default=rank(Label.INACTIVE)),
                node.last_access_time,
                node.component_data[0].value is not None,
                node.component_data[0].host_value is not None,
            )
        return found

    def evict(self, tier: str, num_tokens: int) -> None:
        """Evict, and hold the outcome against the model's."""
        items, freed = self.items(), 0
        first, without = first_out_of_hbm, without_hbm
        if tier == "dram":
            first, without = lambda i: first_out_of_dram(i, self.policy), without_dram
        while freed < num_tokens and (victim := first(items)) is not None:
            items = without(items, victim, self.policy)
            freed += victim.tokens
        evict: Callable[[int], int] = (
            self.live.evict if tier == "hbm" else self.live.cache.evict_host
        )
        assert evict(num_tokens) == freed
        there = {path_of(node) for node in self.live.nodes()}
        for program, path in self.held.items():
            while path and path not in there:
                path = path[: -self.page_size]
            self.held[program] = path
        assert self.items() == items


PROGRAM = st.sampled_from(("p", "q", "r", "s"))
SYMBOLS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
LABEL = st.sampled_from(Label)
TIER = st.sampled_from(("hbm", "dram"))
SERVE = st.tuples(st.just("serve"), PROGRAM, SYMBOLS, st.none() | LABEL)
STEP = st.one_of(
    SERVE,
    SERVE,
    st.tuples(st.just("access"), SYMBOLS),
    st.tuples(st.just("relabel"), PROGRAM, LABEL),
    st.tuples(st.just("release"), PROGRAM),
    st.tuples(st.just("evict"), TIER, st.integers(1, 12)),
)
EXAMPLES = 40


def thorough(test: Callable[..., None]) -> Callable[..., None]:
    phases = (Phase.generate, Phase.shrink)
    return settings(max_examples=EXAMPLES, derandomize=True, phases=phases)(test)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_pages_leave_each_tier_in_the_documented_order(policy: str, page_size: int) -> None:
    @thorough
    @given(st.lists(SERVE, min_size=2, max_size=8), st.lists(STEP, max_size=10))
    def run(first: list[tuple], then: list[tuple]) -> None:
        world = World(policy, page_size)
        with closing(world.live):
            for name, *arguments in (*first, *then):
                getattr(world, name)(*arguments)
            world.live.check_idle()
            while any(item.hbm for item in world.items().values()):
                world.evict("hbm", 1)
            while world.items():
                world.evict("dram", 1)
            world.live.check_idle()

    run()


def test_a_page_keeps_its_copy_in_dram_when_a_page_below_it_gets_one() -> None:
    """Write-through: else the lower copy is lost with its parent, and its pages for ever."""
    live = LiveCache(WRITE_THROUGH, hbm=16, dram=4)
    with closing(live):
        live.serve((1, 2, 3), "p", "idle")
        live.serve((1, 2, 3, 4, 5), "p")  # two more, and DRAM has one page left
        live.check_idle()
        live.evict(5)
        live.check_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_duplicate_goes_before_any_sole_copy_of_a_program(policy: str) -> None:
    live = LiveCache(policy, hbm=16, dram=16)
    with closing(live):
        live.serve((1, 2), "sole", "busy")
        live.evict(2)
        live.serve((3, 4), "both", "busy")
        live.evict(2)
        live.serve((3, 4, 5), "both")  # used later, and back in HBM
        live.cache.evict_host(1 if policy == WRITE_THROUGH else 2)
        assert live.hits((1, 2)) == (0, 2)
        live.check_idle()


@pytest.mark.parametrize("victim", ["p", "q"])
@pytest.mark.parametrize(
    ("tier", "goes", "stays"),
    [
        ("hbm", Label.INACTIVE, Label.IDLE),
        ("hbm", Label.IDLE, Label.BUSY),
        ("dram", Label.INACTIVE, Label.BUSY),
        ("dram", Label.BUSY, Label.IDLE),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_relabelling_alone_turns_the_order_round(
    policy: str, tier: str, goes: Label, stays: Label, victim: str
) -> None:
    live = LiveCache(policy)
    with closing(live):
        prompts = {"p": (1, 2), "q": (3, 4)}
        for program, tokens in prompts.items():  # q is the one used last
            live.serve(tokens, program, (stays if program == victim else goes).value)
        if tier == "dram":
            live.evict(4)
        for program in prompts:
            live.execute(SetLabel(program, 1, goes if program == victim else stays))
        evict = live.evict if tier == "hbm" else live.cache.evict_host
        assert evict(1) == 2
        there = {program: live.hits(tokens) for program, tokens in prompts.items()}
        lost, kept = ((0, 2), (2, 0)) if tier == "hbm" else ((0, 0), (0, 2))
        assert there == {program: lost if program == victim else kept for program in prompts}


def test_an_eviction_leaves_what_runs_and_what_is_being_copied_alone() -> None:
    live = LiveCache(WRITE_THROUGH)
    with closing(live):
        req = live.start((1, 2, 3), "p", "inactive")
        copied = live.start((4, 5, 6), "q", "inactive")
        live.end(copied)  # its copy to DRAM is not polled yet
        assert live.evict(6) == 0
        assert live.cache.evict_host(6) == 0
        live.check()
        live.end(req)
        live.tick()
        assert live.evict(6) == 6
        live.check_idle()
