"""Every command of the control channel in every state of a program, on a real cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Demote,
    LevelsQuestion,
    Pin,
    Promote,
    Release,
    Residency,
    ResidencyQuestion,
    SetLabel,
    Status,
    Unpin,
)

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache, path_of

PROMPT = tuple(range(100, 108))
OTHER = tuple(range(200, 224))
COMMANDS: dict[str, Callable[[str, int], AnyCommand]] = {
    "set_label": lambda program, epoch: SetLabel(program, epoch, Label.IDLE),
    "demote": Demote,
    "promote": Promote,
    "pin": Pin,
    "unpin": Unpin,
    "release": Release,
}


@pytest.fixture(params=[WRITE_THROUGH, WRITE_BACK])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(policy: str) -> Iterator[Callable[..., LiveCache]]:
    made: list[LiveCache] = []

    def make_one(**sizes: int) -> LiveCache:
        made.append(LiveCache(policy, **sizes))
        return made[-1]

    yield make_one
    for live in made:
        live.close()


def residency(live: LiveCache, program: str = "p") -> Residency:
    [one] = live.cache.worker.answer(ResidencyQuestion(program)).programs
    return one


def check_levels(live: LiveCache) -> None:
    """Both tiers' parts are their capacity, and say what the pools say."""
    found = live.cache.worker.answer(LevelsQuestion())
    for level in (found.hbm, found.dram):
        parts = (level.free, level.evictable, level.protected, level.in_flight)
        assert min(parts) >= 0
        assert sum(parts) == level.capacity
    assert (found.hbm.capacity, found.dram.capacity) == (live.allocator.size, live.host.size)
    assert found.hbm.free == live.allocator.available_size()
    assert found.dram.free == live.host.available_size()
    assert found.bytes_per_token == live.host.page_bytes // live.page_size


# States of program "p", whose epoch is 5 wherever it is known.


def nothing_held(make: Callable[..., LiveCache]) -> LiveCache:
    live = make()
    live.execute(SetLabel("p", 5, Label.BUSY))
    return live


def in_hbm(make: Callable[..., LiveCache], **sizes: int) -> LiveCache:
    live = make(**sizes)
    live.serve(PROMPT, "p", "busy", 5)
    return live


def running(make: Callable[..., LiveCache]) -> LiveCache:
    live = make()
    live.start(PROMPT, "p", "busy", 5)
    return live


def after(command: AnyCommand, **sizes: int) -> Callable[..., LiveCache]:
    def state(make: Callable[..., LiveCache]) -> LiveCache:
        live = in_hbm(make, **sizes)
        assert live.execute(command).status is not Status.REFUSED
        return live

    return state


def evicted(make: Callable[..., LiveCache]) -> LiveCache:
    live = in_hbm(make, dram=64)
    live.evict(len(PROMPT))
    return live


def lost(make: Callable[..., LiveCache]) -> LiveCache:
    live = evicted(make)
    live.cache.evict_host(len(PROMPT))
    return live


def hbm_full(make: Callable[..., LiveCache]) -> LiveCache:
    live = evicted(make)
    live.start((*OTHER, 1, 2, 3))
    return live


STATES: dict[str, Callable[[Callable[..., LiveCache]], LiveCache]] = {
    "unknown": lambda make: make(),
    "nothing held": nothing_held,
    "in HBM": in_hbm,
    "running": running,
    "pinned": after(Pin("p", 5)),
    "demoting": after(Demote("p", 5)),
    "released": after(Release("p", 5)),
    "evicted": evicted,
    "lost": lost,
    "DRAM too small": lambda make: in_hbm(make, dram=4),
    "HBM full": hbm_full,
}
Outcome = tuple[Status, str, int]
DONE, REFUSED = Status.DONE, Status.REFUSED
NOTHING_HERE = (DONE, "nothing in HBM is the program's alone", 0)
NOTHING_THERE = (DONE, "nothing of the program is in DRAM alone", 0)
NOT_PINNED = (DONE, "the program was not pinned", 0)
UNPINNABLE = (REFUSED, "nothing of the program is in HBM", 0)
UNKNOWN = (REFUSED, "program 'p' is unknown to this worker", 0)
MOVES = (Status.STARTED, "", len(PROMPT))
GOOD = (DONE, "", 0)


def outcomes(
    demote: Outcome, promote: Outcome, pin: Outcome, unpin: Outcome = NOT_PINNED
) -> dict[str, Outcome]:
    moves = {"demote": demote, "promote": promote, "pin": pin, "unpin": unpin}
    return {"set_label": GOOD, **moves, "release": GOOD}


NOTHING = outcomes(NOTHING_HERE, NOTHING_THERE, UNPINNABLE)
EXPECTED: dict[str, dict[str, Outcome]] = {
    "unknown": {**dict.fromkeys(COMMANDS, UNKNOWN), "set_label": GOOD},
    "nothing held": NOTHING,
    "in HBM": outcomes(MOVES, NOTHING_THERE, GOOD),
    "running": outcomes((REFUSED, "the program runs: 1 in the engine", 0), NOTHING_THERE, GOOD),
    "pinned": outcomes(
        (REFUSED, "the program is pinned; unpin it first", 0), NOTHING_THERE, GOOD, GOOD
    ),
    "demoting": outcomes(MOVES, NOTHING_THERE, GOOD),
    "released": NOTHING,
    "evicted": outcomes(NOTHING_HERE, MOVES, UNPINNABLE),
    "lost": NOTHING,
    "DRAM too small": outcomes(
        (REFUSED, "DRAM has no room for 8 tokens, they stay in HBM", 0), NOTHING_THERE, GOOD
    ),
    "HBM full": outcomes(
        NOTHING_HERE,
        (REFUSED, "HBM has room for 5 tokens, 8 are in DRAM alone", 0),
        UNPINNABLE,
    ),
}


def places(live: LiveCache) -> dict[tuple[int, ...], tuple[bool, bool, int]]:
    """Of each node: in HBM, in DRAM, locks."""
    datas = {path_of(node): node.component_data[0] for node in live.nodes()}
    return {
        path: (data.value is not None, data.host_value is not None, data.lock_ref)
        for path, data in datas.items()
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", STATES)
def test_a_command_answers_what_becomes_of_it(
    state: str, command: str, make: Callable[..., LiveCache]
) -> None:
    live = STATES[state](make)
    before = places(live), live.held()
    result = live.execute(COMMANDS[command]("p", 6))
    assert (result.status, result.reason, result.tokens) == EXPECTED[state][command]
    if result.status is REFUSED:
        assert (places(live), live.held()) == before
    live.check()
    check_levels(live)
    live.tick()
    live.check()
    check_levels(live)
    if result.status is Status.STARTED:
        size = len(PROMPT)
        assert live.hits(PROMPT) == ((0, size) if command == "demote" else (size, 0))
    if state != "unknown":
        assert residency(live).epoch == 6


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", [state for state in STATES if state != "unknown"])
def test_a_command_with_an_old_epoch_changes_nothing(
    state: str, command: str, make: Callable[..., LiveCache]
) -> None:
    live = STATES[state](make)
    before = places(live), live.held(), residency(live)
    result = live.execute(COMMANDS[command]("p", 4))
    assert (result.status, result.reason) == (REFUSED, "epoch 4 is stale, 5 was seen")
    assert (places(live), live.held(), residency(live)) == before
    live.check()


def test_a_refused_command_raises_the_epoch_all_the_same(make: Callable[..., LiveCache]) -> None:
    live = running(make)
    assert live.execute(Demote("p", 9)).status is REFUSED
    assert live.execute(SetLabel("p", 8, Label.IDLE)).reason == "epoch 8 is stale, 9 was seen"
    assert residency(live).label is Label.BUSY


def test_few_tokens_are_not_worth_a_load(make: Callable[..., LiveCache]) -> None:
    live = evicted(make)
    live.cache.load_back_threshold = 10
    result = live.execute(Promote("p", 6))
    assert (result.status, result.reason) == (
        REFUSED,
        "8 tokens are in DRAM alone; fewer than 10 are not worth a load",
    )
    live.check_idle()


def test_promotions_beyond_what_sglang_can_follow_are_refused_until_some_are_done(
    make: Callable[..., LiveCache],
) -> None:
    live = make()
    slots = live.cache.cache_controller.layer_done_counter.num_counters
    programs = [f"p{index}" for index in range(slots + 1)]
    for index, program in enumerate(programs):
        live.serve((index, 1, 2), program)
    live.evict(32)
    results = [live.execute(Promote(program, 1)) for program in programs]
    assert [result.status for result in results[:-1]] == [Status.STARTED] * slots
    assert (results[-1].status, results[-1].reason) == (
        REFUSED,
        "too many loads are under way; ask again",
    )
    live.check()
    check_levels(live)
    live.tick()
    assert live.execute(Promote(programs[-1], 1)).status is Status.STARTED
    live.tick()
    live.check_idle()
    assert residency(live, programs[-1]).hbm_private == 3


def test_a_promotion_makes_room_in_label_order(make: Callable[..., LiveCache]) -> None:
    live = make(hbm=32, dram=64)
    live.serve(PROMPT, "p", "busy")
    live.evict(8)
    others = {"busy": range(8), "idle": range(10, 18), "inactive": range(20, 36)}
    for label, tokens in others.items():
        live.serve(tuple(tokens), label, label)
    assert live.execute(Promote("p", 1)).tokens == 8
    live.tick()
    live.check_idle()
    in_hbm = {label: live.hits(tuple(tokens))[0] for label, tokens in others.items()}
    assert in_hbm == {"busy": 8, "idle": 8, "inactive": 0}
    assert live.hits(PROMPT) == (8, 0)


def test_what_does_not_fit_into_dram_stays_in_hbm_and_the_answer_says_how_much(
    make: Callable[..., LiveCache],
) -> None:
    live = make(hbm=32, dram=8)
    live.serve(PROMPT[:4], "p")
    live.serve(PROMPT + tuple(range(6)), "p")  # in HBM: 4 and 10 tokens
    result = live.execute(Demote("p", 1))
    assert (result.status, result.tokens) == (Status.STARTED, 4)
    assert result.reason == "DRAM has no room for 10 tokens, they stay in HBM"
    live.tick()
    live.check_idle()
    assert live.hits(PROMPT + tuple(range(6))) == (14, 0)


def test_pages_that_other_programs_hold_stay_when_one_is_demoted(
    make: Callable[..., LiveCache],
) -> None:
    live = make()
    live.serve((*PROMPT, 1, 2), "p")
    live.serve((*PROMPT, 3, 4), "q")
    assert live.execute(Demote("p", 1)).tokens == 2
    live.tick()
    live.check_idle()
    assert live.hits((*PROMPT, 1, 2)) == (8, 2)
    assert live.hits((*PROMPT, 3, 4)) == (10, 0)
    found = residency(live)
    assert (found.hbm_private, found.dram_private, found.shared_tokens) == (0, 2, 8)
    assert found.shared_group == residency(live, "q").shared_group != ""


def test_a_program_leaves_hbm_although_an_earlier_answer_of_it_hangs_below(
    make: Callable[..., LiveCache],
) -> None:
    """The next prompt leaves the thinking of the last answer out: a branch that nobody holds."""
    live = make()
    live.serve(PROMPT, "p", output=(1, 2, 3))
    live.serve((*PROMPT, 9, 9), "p", output=(4, 5))
    assert live.execute(Demote("p", 1)).status is Status.STARTED
    live.tick()
    live.check_idle()
    assert residency(live).hbm_private == 0


def test_a_demotion_that_a_request_overtakes_frees_nothing(make: Callable[..., LiveCache]) -> None:
    live = after(Demote("p", 5))(make)
    req = live.look_up(live.request((*PROMPT, 1), "p"))
    live.tick()
    assert live.hits(PROMPT) == (8, 0)
    live.abort_waiting(req)
    live.tick()
    live.check_idle()
    assert live.hits(PROMPT) == (8, 0)


@pytest.mark.parametrize(
    "overtaking", [SetLabel("p", 6, Label.BUSY), Promote("p", 6), Pin("p", 6), Release("p", 6)]
)
def test_a_later_decision_stops_a_demotion(
    overtaking: AnyCommand, make: Callable[..., LiveCache]
) -> None:
    live = after(Demote("p", 5))(make)
    assert live.execute(overtaking).status is DONE
    live.tick()
    live.check()
    assert live.hits(PROMPT) == (8, 0)


def test_a_pin_that_is_refused_leaves_a_demotion_alone(make: Callable[..., LiveCache]) -> None:
    live = after(Demote("p", 5), hbm=8)(make)
    assert live.execute(Pin("p", 6)).status is REFUSED
    live.tick()
    live.check_idle()
    assert live.hits(PROMPT) == (0, 8)


def test_a_promotion_that_is_refused_leaves_a_demotion_alone(
    make: Callable[..., LiveCache],
) -> None:
    live = make(hbm=16, dram=64)
    live.serve(PROMPT[:4], "p")
    live.serve(PROMPT, "p")
    live.evict(4)
    assert live.execute(Demote("p", 5)).tokens == 4
    live.start(range(12))  # all that is free
    assert live.execute(Promote("p", 6)).status is REFUSED
    live.tick()
    live.check()
    assert live.hits(PROMPT) == (0, 8)


@pytest.mark.parametrize("under_way", [Pin("p", 6), Demote("p", 6), Promote("q", 6)])
def test_after_a_flush_all_is_empty_and_works_again(
    under_way: AnyCommand, make: Callable[..., LiveCache]
) -> None:
    live = make(hbm=64, dram=64)
    live.serve(OTHER, "q")
    live.evict(len(OTHER))
    live.serve(PROMPT, "p", "idle", 5)
    assert live.execute(under_way).status is not REFUSED
    live.flush()
    check_levels(live)
    assert list(live.nodes()) == []
    found = residency(live)
    assert (found.hbm_private, found.dram_private, found.pinned, found.running) == (0, 0, False, 0)
    assert found.label is Label.IDLE
    live.tick()
    live.serve(PROMPT, "p")
    live.check_idle()
    assert live.execute(Demote("p", 7)).tokens == 8
    live.tick()
    assert live.execute(Promote("p", 8)).tokens == 8
    live.tick()
    live.check_idle()
    assert live.hits(PROMPT) == (8, 0)
