"""Pins on a real cache: what they keep, how long, how much, and that no lock outlives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Demote,
    Pin,
    Promote,
    Release,
    SetLabel,
    Status,
    Unpin,
)

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache

PROMPT = tuple(range(100, 108))
REFUSED = Status.REFUSED


@pytest.fixture(params=[WRITE_THROUGH, WRITE_BACK])
def live(request: pytest.FixtureRequest) -> Iterator[LiveCache]:
    made = LiveCache(request.param)  # pins may hold 16 tokens
    yield made
    made.close()


def pinned(live: LiveCache, tokens: tuple[int, ...] = PROMPT, program: str = "p") -> None:
    live.serve(tokens, program)
    assert live.execute(Pin(program, 1, lifetime_s=10.0)).status is Status.DONE


def squeeze(live: LiveCache) -> None:
    """Evict whatever can be, once no copy is under way."""
    live.tick()
    live.evict(live.allocator.size)
    live.check()


def test_pinned_pages_stay_where_all_others_leave(live: LiveCache) -> None:
    pinned(live)
    live.execute(SetLabel("p", 1, Label.INACTIVE))
    live.serve(tuple(range(12)), "q", "busy")
    squeeze(live)
    assert live.hits(PROMPT) == (8, 0)
    assert live.hits(tuple(range(12)))[0] == 0
    assert live.cache.tree_core.protected_size() == 8


@pytest.mark.parametrize(("now_s", "there"), [(9.9, True), (10.0, False), (1e6, False)])
def test_a_pin_ends_with_its_time(live: LiveCache, now_s: float, there: bool) -> None:
    pinned(live)
    live.now_s = now_s
    live.tick()
    squeeze(live)
    assert (live.hits(PROMPT) == (8, 0)) is there
    if not there:
        live.check_idle()


def test_a_further_pin_sets_the_time_anew(live: LiveCache) -> None:
    pinned(live)
    live.now_s = 9.0
    live.execute(Pin("p", 1, lifetime_s=5.0))
    for live.now_s, tokens in ((13.9, 8), (14.0, 0)):
        live.tick()
        squeeze(live)
        assert live.hits(PROMPT)[0] == tokens
    live.check_idle()


@pytest.mark.parametrize("command", [Unpin("p", 2), Release("p", 2)])
def test_no_lock_remains_when_a_pin_is_ended(live: LiveCache, command: AnyCommand) -> None:
    pinned(live)
    live.execute(Pin("p", 1))
    live.serve((*PROMPT[:4], 1, 2), "q")  # divides what is pinned
    live.serve((*PROMPT, 1, 2), "p")  # and the pin follows
    live.check()
    assert live.execute(command).status is Status.DONE
    live.check_idle()
    squeeze(live)
    assert live.hits(PROMPT)[0] == 0


def test_what_a_pinned_program_computes_later_is_kept_as_well(live: LiveCache) -> None:
    pinned(live)
    live.serve((*PROMPT, 1, 2), "p", output=(3,))
    squeeze(live)
    assert live.hits((*PROMPT, 1, 2, 3)) == (11, 0)
    assert live.cache.tree_core.protected_size() == 11


def test_a_pin_leaves_the_branch_that_a_compaction_left(live: LiveCache) -> None:
    pinned(live)
    live.serve((*PROMPT[:4], 1, 2), "p")
    squeeze(live)
    assert live.hits((*PROMPT[:4], 1, 2)) == (6, 0)
    assert live.hits(PROMPT)[0] == 4


def test_a_pin_follows_the_requests_that_run_when_it_is_set(live: LiveCache) -> None:
    req = live.start(PROMPT, "p")
    assert live.execute(Pin("p", 1)).status is Status.DONE
    live.decode(req, (1, 2))
    live.end(req)
    squeeze(live)
    assert live.hits((*PROMPT, 1, 2)) == (10, 0)


def test_an_aborted_request_leaves_a_pin_as_it_was(live: LiveCache) -> None:
    pinned(live)
    req = live.start((*PROMPT, 1, 2), "p")
    live.abort_in_prefill(req)
    squeeze(live)
    assert live.hits((*PROMPT, 1, 2))[0] == 8
    assert live.cache.tree_core.protected_size() == 8


def test_pins_hold_half_of_hbm_at_most(live: LiveCache) -> None:
    pinned(live)
    live.serve(tuple(range(9)), "q")
    result = live.execute(Pin("q", 1))
    assert (result.status, result.reason) == (
        REFUSED,
        "pins may hold 16 tokens of HBM, others have 8 and it has 9",
    )
    live.execute(Unpin("p", 1))
    assert live.execute(Pin("q", 1)).status is Status.DONE


def test_a_pin_stays_where_it_is_when_its_program_outgrows_the_share(live: LiveCache) -> None:
    pinned(live)
    live.serve((*PROMPT, *range(12)), "p")
    squeeze(live)
    assert live.hits((*PROMPT, *range(12)))[0] == 8
    live.now_s = 10.0
    live.tick()
    live.check_idle()


def test_a_program_that_is_in_hbm_in_part_is_pinned_so_far(live: LiveCache) -> None:
    live.serve(PROMPT[:4], "p")
    live.serve(PROMPT, "p")
    live.evict(4)
    assert live.execute(Pin("p", 1)).status is Status.DONE
    squeeze(live)
    assert live.hits(PROMPT) == (4, 4)
    assert live.execute(Promote("p", 1)).tokens == 4
    live.tick()
    assert live.execute(Unpin("p", 1)).status is Status.DONE
    live.check_idle()


@pytest.mark.parametrize("other", ["demoted", "promoted"])
def test_pinned_pages_stay_while_other_programs_move(live: LiveCache, other: str) -> None:
    pinned(live)
    moved = (*PROMPT[:4], *range(20))
    live.serve(moved, "q")
    command: Callable[[str, int], AnyCommand] = Demote
    if other == "promoted":
        squeeze(live)
        command = Promote
    assert live.execute(command("q", 1)).tokens == 20
    live.tick()
    live.check()
    assert live.hits(PROMPT) == (8, 0)
    assert live.hits(moved) == ((4, 20) if other == "demoted" else (24, 0))


def test_a_flush_ends_pins(live: LiveCache) -> None:
    pinned(live)
    live.flush()
    assert live.execute(Unpin("p", 1)).reason == "the program was not pinned"
    live.serve(PROMPT, "p")
    live.check_idle()


def test_a_pin_gives_way_where_a_request_has_no_other_room(live: LiveCache) -> None:
    pinned(live)
    pinned_tokens = live.cache.worker.pins.yieldable_tokens()
    assert pinned_tokens == live.cache.tree_core.protected_size() == 8
    before = live.cache.evictable_size()
    squeeze(live)
    free = live.allocator.available_size()
    assert live.cache.evictable_size() == pinned_tokens <= before
    live.cache.evict_for_alloc(EvictParams(num_tokens=live.allocator.size - free))
    assert live.allocator.available_size() == live.allocator.size
    assert "p" not in live.cache.worker.pins
    live.check()


def test_a_pin_stays_where_others_can_leave_instead(live: LiveCache) -> None:
    pinned(live)
    live.serve(tuple(range(12)), "q", "busy")
    live.tick()
    room = live.allocator.available_size()
    live.cache.evict_for_alloc(EvictParams(num_tokens=4))
    assert live.allocator.available_size() >= room + 4
    assert "p" in live.cache.worker.pins
    assert live.hits(PROMPT) == (8, 0)
