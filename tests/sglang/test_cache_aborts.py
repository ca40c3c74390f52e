"""A request that is aborted in any phase leaves pools, locks, labels and holders as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sglang.srt.managers.schedule_batch import Req

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import Pin, Residency, ResidencyQuestion

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache

HEAD = tuple(range(16))
FIRST = (*HEAD, *range(100, 116))  # what program p had asked before
PROMPTS = {
    "the same": FIRST,
    "longer": (*FIRST, *range(200, 224)),
    "compacted": (*HEAD, *range(300, 324)),
    "another": tuple(range(400, 424)),
}
Abort = Callable[[LiveCache, tuple[int, ...], str, str | None], Req | None]
Kept = list[Req | None]


@pytest.fixture(
    params=[(policy, size) for policy in (WRITE_THROUGH, WRITE_BACK) for size in (1, 8)]
)
def live(request: pytest.FixtureRequest) -> Iterator[LiveCache]:
    policy, page_size = request.param
    made = LiveCache(policy, page_size, hbm=128 // page_size, dram=256 // page_size)
    made.serve(HEAD, "q", "idle", 7)
    made.serve(FIRST, "p", "busy", 7)
    yield made
    made.close()


@pytest.fixture
def kept() -> Kept:
    """Aborted requests: nothing may wait until they are collected."""
    return []


def waiting(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> Req:
    req = live.look_up(live.request(tokens, program, label))
    live.look_up(req)
    live.abort_waiting(req)
    return req


def waiting_while_pages_leave(
    live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None
) -> Req:
    req = live.look_up(live.request(tokens, program, label))
    live.evict(8)
    live.look_up(req)
    live.abort_waiting(req)
    return req


def loaded(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> Req:
    live.evict(48)
    req = live.admit(live.look_up(live.request(tokens, program, label)))
    live.abort_in_prefill(req)
    return req


def between_chunks(
    live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None
) -> Req:
    req = live.look_up(live.request(tokens, program, label))
    live.admit(req, end=max(req.prefix_len + 1, 20))
    live.publish(req)
    live.check()
    live.abort_in_prefill(req)
    return req


def second_chunk(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> Req:
    req = live.look_up(live.request((*tokens, 1, 2, 3), program, label))
    live.admit(req, end=req.prefix_len + 1)
    live.publish(req)
    live.tick()
    live.next_chunk(req)
    live.abort_in_prefill(req)
    return req


def decoding(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> Req:
    req = live.decode(live.start(tokens, program, label), range(20))
    live.check()
    live.end(req, aborted=True)
    return req


def retracted(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> Req:
    req = live.decode(live.start(tokens, program, label), range(4))
    live.retract(req)
    live.check()
    live.look_up(req)
    live.abort_waiting(req)
    return req


def dropped(live: LiveCache, tokens: tuple[int, ...], program: str, label: str | None) -> None:
    live.look_up(live.request(tokens, program, label))  # and nobody keeps it


PHASES: list[Abort] = [
    waiting,
    waiting_while_pages_leave,
    loaded,
    between_chunks,
    second_chunk,
    decoding,
    retracted,
    dropped,
]


def reports(live: LiveCache) -> dict[str, Residency]:
    found = live.cache.worker.answer(ResidencyQuestion()).programs
    return {one.program: one for one in found}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("abort", PHASES, ids=lambda phase: phase.__name__)
def test_an_abort_leaves_every_token_held_and_labelled_as_before(
    abort: Abort, prompt: str, live: LiveCache, kept: Kept
) -> None:
    before, known = live.held(), reports(live)
    free = live.allocator.available_size() + live.cache.evictable_size()
    kept.append(abort(live, PROMPTS[prompt], "p", None))
    live.tick()
    live.check_idle()
    after = live.held()
    assert after == {token: before.get(token, (0, 0, 0)) for token in after}
    assert set(before) <= set(after)
    assert live.allocator.available_size() + live.cache.evictable_size() == free
    for name, one in reports(live).items():
        held = one.hbm_private or one.dram_private or one.shared_tokens
        assert held
        assert (one.label, one.epoch, one.running) == (known[name].label, known[name].epoch, 0)
        assert (one.shared_tokens, one.shared_group) == (
            known[name].shared_tokens,
            known[name].shared_group,
        )


@pytest.mark.parametrize("abort", PHASES, ids=lambda phase: phase.__name__)
def test_an_aborted_request_of_a_new_program_leaves_it_holding_nothing(
    abort: Abort, live: LiveCache, kept: Kept
) -> None:
    before = live.held()
    kept.append(abort(live, PROMPTS["longer"], "new", "idle"))
    live.tick()
    live.check_idle()
    after = live.held()
    assert after == {token: before.get(token, (0, 0, 0)) for token in after}
    found = reports(live)["new"]
    assert (found.label, found.running) == (Label.IDLE, 0)
    assert (found.hbm_private, found.dram_private, found.shared_tokens) == (0, 0, 0)


@pytest.mark.parametrize("abort", PHASES, ids=lambda phase: phase.__name__)
def test_the_label_that_an_aborted_request_brought_stays_since_it_was_a_decision(
    abort: Abort, live: LiveCache, kept: Kept
) -> None:
    before = live.held()
    kept.append(abort(live, PROMPTS["compacted"], "p", "inactive"))
    live.tick()
    live.check_idle()
    assert reports(live)["p"].label is Label.INACTIVE
    moved = {(0, 1, 1): (1, 1, 0), (0, 0, 1): (1, 0, 0), (0, 0, 0): (0, 0, 0)}
    after = live.held()
    assert after == {token: moved[before.get(token, (0, 0, 0))] for token in after}


@pytest.mark.parametrize("abort", PHASES, ids=lambda phase: phase.__name__)
def test_a_request_that_runs_beside_an_aborted_one_keeps_its_pages(
    abort: Abort, live: LiveCache, kept: Kept
) -> None:
    req = live.start((*HEAD, *range(500, 520)), "p")
    live.tick()
    before = live.held()
    kept.append(abort(live, PROMPTS["longer"], "p", None))
    live.tick()
    live.check()
    after = live.held()
    assert after == {token: before.get(token, (0, 0, 0)) for token in after}
    assert reports(live)["p"].running == 1
    live.end(req)
    live.tick()
    live.check_idle()
    assert live.hits((*HEAD, *range(500, 516)))[0] == 32


@pytest.mark.parametrize("abort", PHASES, ids=lambda phase: phase.__name__)
def test_an_abort_in_a_pinned_program_leaves_the_pin_alone(
    abort: Abort, live: LiveCache, kept: Kept
) -> None:
    live.execute(Pin("p", 7))
    locked = live.cache.tree_core.protected_size()
    assert locked == len(FIRST)
    kept.append(abort(live, PROMPTS["compacted"], "p", None))
    live.tick()
    live.check()
    assert live.cache.tree_core.protected_size() == locked
    live.cache.worker.pins.end("p")
    live.check_idle()


def test_a_retracted_request_holds_what_its_next_match_finds(live: LiveCache) -> None:
    output = range(700, 716)
    req = live.decode(live.start(FIRST, "new"), output)
    live.serve((*FIRST, *output), "other")
    live.retract(req)
    assert live.held()[(*FIRST, *output[:8])] == (0, 0, 1)
    live.look_up(req)
    assert live.held()[(*FIRST, *output[:8])] == (0, 0, 2)
    live.publish(live.admit(req))
    live.end(req)
    live.tick()
    live.check_idle()
