"""KV that was demoted and promoted is the same to the byte; prompts around a page's length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import (
    Demote,
    Promote,
    Residency,
    ResidencyQuestion,
    Status,
)

from .caches import WRITE_BACK, WRITE_THROUGH, LiveCache
from .host_pools import as_bytes, tensors

PAGE_SIZES = (1, 16, 64)
POLICIES = (WRITE_THROUGH, WRITE_BACK)
Rows = list[torch.Tensor]


@pytest.fixture(params=[(policy, size) for policy in POLICIES for size in PAGE_SIZES], ids=str)
def live(request: pytest.FixtureRequest) -> Iterator[LiveCache]:
    policy, page_size = request.param
    made = LiveCache(policy, page_size, hbm=16, dram=32)
    yield made
    made.close()


def prompt(live: LiveCache, num_pages: int, seed: int) -> tuple[int, ...]:
    return tuple(seed * 1000 + index for index in range(num_pages * live.page_size))


def rows_in_hbm(live: LiveCache, tokens: tuple[int, ...]) -> Rows:
    """The prompt's bytes in every layer's K and V, as a request that matches it would read them."""
    req = live.look_up(live.request((*tokens, 1)))
    assert req.prefix_len == len(tokens)
    slots = live.cache.prefix_device_indices(req)
    live.abort_waiting(req)
    pool = live.allocator.get_kvcache()
    return [as_bytes(t)[slots.long()].clone() for layer in tensors(pool) for t in layer]


def overwrite_free_slots(live: LiveCache) -> None:
    """A request without a program computes something else into whatever is free in HBM."""
    free = live.allocator.available_size() // live.page_size * live.page_size
    if free:
        req = live.start(tuple(range(50_000, 50_000 + free)))
        live.end(req, aborted=True, checkpoint=False)
        live.tick()


@pytest.mark.parametrize("traffic", [0, 3])
def test_bytes_after_demote_and_promote_equal_the_bytes_before(
    live: LiveCache, traffic: int
) -> None:
    tokens = prompt(live, 5, seed=1)
    live.serve(tokens, "p", "idle")
    before = rows_in_hbm(live, tokens)
    assert len(before) == 4  # K and V of two layers
    assert live.execute(Demote("p", 1)).tokens == len(tokens)
    live.tick()
    assert live.hits(tokens) == (0, len(tokens))
    overwrite_free_slots(live)
    for other in range(traffic):
        live.serve(prompt(live, 6, seed=2 + other), f"q{other}", "busy")
        live.check_idle()
    assert live.execute(Promote("p", 2)).tokens == len(tokens)
    live.check()
    live.tick()
    after = rows_in_hbm(live, tokens)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    live.check_idle()


def test_a_request_that_follows_a_demotion_reads_the_same_bytes(live: LiveCache) -> None:
    tokens = prompt(live, 5, seed=1)
    live.serve(tokens, "p")
    before = rows_in_hbm(live, tokens)
    live.execute(Demote("p", 1))
    live.tick()
    overwrite_free_slots(live)
    req = live.admit(live.look_up(live.request((*tokens, 7), "p")))
    assert req.prefix_len == len(tokens)
    slots = live.rows.req_to_token[req.kv.req_pool_idx, : len(tokens)].long()
    pool = live.allocator.get_kvcache()
    read = [as_bytes(t)[slots] for layer in tensors(pool) for t in layer]
    assert all(torch.equal(a, b) for a, b in zip(read, before, strict=True))
    live.publish(req)
    live.end(req)
    live.tick()
    live.check_idle()


SIZES = {(page, n) for page in PAGE_SIZES for n in (1, page - 1, page, page + 1) if n > 0}


def report(live: LiveCache) -> Residency:
    [one] = live.cache.worker.answer(ResidencyQuestion("p")).programs
    return one


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("page_size", "num_tokens"), sorted(SIZES))
def test_a_prompt_around_the_length_of_a_page_is_labelled_as_far_as_its_pages_go(
    policy: str, page_size: int, num_tokens: int
) -> None:
    live = LiveCache(policy, page_size, hbm=16, dram=16)
    tokens, whole = tuple(range(num_tokens)), num_tokens // page_size * page_size
    live.serve(tokens, "p", "idle", 3)
    live.check_idle()
    assert live.held() == {tokens[:n]: (0, 1, 0) for n in range(1, whole + 1)}
    assert (report(live).hbm_private, report(live).label) == (whole, Label.IDLE)
    demoted = live.execute(Demote("p", 3))
    assert (demoted.status, demoted.tokens) == (Status.STARTED if whole else Status.DONE, whole)
    live.tick()
    promoted = live.execute(Promote("p", 3))
    assert promoted.tokens == whole
    live.tick()
    live.serve(tokens, "p")
    live.serve(tokens, "q", "busy")
    live.check_idle()
    assert set(live.held().values()) == ({(0, 1, 1)} if whole else set())
    live.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_prompt_of_which_nothing_can_be_matched_holds_nothing(
    policy: str, page_size: int, num_tokens: int
) -> None:
    live = LiveCache(policy, page_size, hbm=16, dram=16)
    live.serve(tuple(range(2 * page_size)), "q")
    before = live.held()
    req = live.look_up(live.request(tuple(range(num_tokens)), "p", "busy", 1))
    assert (req.prefix_len, req.host_hit_length) == (0, 0)
    assert live.held() == before
    assert report(live).running == 1
    live.abort_waiting(req)
    assert report(live).running == 0
    live.check_idle()
    live.close()


PIECE = st.tuples(st.sampled_from("pqrs"), st.sampled_from((1, 15, 16, 17, 40, 64)), st.booleans())
STEP = st.one_of(
    st.tuples(st.just("serve"), PIECE),
    st.tuples(st.sampled_from(("demote", "promote")), st.sampled_from("pqrs")),
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_all_bytes_in_both_tiers_are_right_whatever_the_traffic(
    policy: str, page_size: int
) -> None:
    @settings(max_examples=25, derandomize=True, phases=(Phase.generate, Phase.shrink))
    @given(st.lists(STEP, min_size=4, max_size=16))
    def run(steps: list[tuple[str, Any]]) -> None:
        live = LiveCache(policy, page_size, hbm=128 // page_size, dram=128 // page_size)
        for step, argument in steps:
            if step == "serve":
                program, length, shared = argument
                head = () if not shared else tuple(range(32))
                live.serve((*head, *(ord(program) + n for n in range(length))), program)
            else:
                command = Demote if step == "demote" else Promote
                live.execute(command(str(argument), 1))
                live.check()
                live.tick()
            live.check_idle()
        live.close()

    run()


def test_what_is_matched_is_what_the_tree_holds(live: LiveCache) -> None:
    """The bytes of `rows_in_hbm` are those of the node's own slots, in order."""
    tokens = prompt(live, 3, seed=1)
    live.serve(tokens, "p")
    [node] = live.nodes()
    slots = live.cache.tree_core.get_component_device_value(node.id, ComponentType.FULL)
    pool = live.allocator.get_kvcache()
    direct = [as_bytes(t)[slots] for layer in tensors(pool) for t in layer]
    matched = rows_in_hbm(live, tokens)
    assert all(torch.equal(a, b) for a, b in zip(matched, direct, strict=True))
