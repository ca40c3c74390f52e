"""A queue's sum is private tokens plus the largest shared head per group (design section 6)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.scheduling import IdlenessRing
from kvtier.scheduling.state import Ledger, ProgramState

from .scene import EXACT, PROPERTY, demoted, forwarded, scene


def program(name: str, tokens: int, group: str | None, shared_tokens: int) -> ProgramState:
    return ProgramState(
        name, 0, IdlenessRing(1), shared_group=group, shared_tokens=shared_tokens, tokens=tokens
    )


SIZES = st.tuples(
    st.integers(0, 100), st.sampled_from((None, "g", "h")), st.integers(0, 100), st.booleans()
)


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 5), SIZES), max_size=40))
def test_the_running_sum_equals_the_sum_taken_afresh(
    changes: list[tuple[int, tuple[int, str | None, int, bool]]],
) -> None:
    ledger, members = Ledger(), {}
    for index, (tokens, group, shared_tokens, leaves) in changes:
        name = f"p{index}"
        state = program(name, tokens, group, shared_tokens)
        if name not in members:
            cost = ledger.cost_tokens(state)
            before = ledger.tokens
            ledger.add(state)
            assert ledger.tokens == before + cost
            members[name] = state
        elif leaves:
            ledger.remove(name)
            del members[name]
        else:
            ledger.update(state)
            members[name] = state
        heads: dict[str, int] = {}
        private = 0
        for state in members.values():
            covered = min(state.shared_tokens, state.tokens) if state.shared_group else 0
            private += state.tokens - covered
            if state.shared_group is not None:
                heads[state.shared_group] = max(heads.get(state.shared_group, 0), covered)
        assert ledger.tokens == private + sum(heads.values()) >= 0
        assert set(ledger) == set(members)


def test_a_head_is_counted_once_per_group_so_more_programs_fit() -> None:
    s = scene(hbm_tokens=100)
    for name in "abcde":
        s.arrive(name, "g", 50)
        assert forwarded(s.ask(name, 60)) == [name]
    assert s.scheduler.workers["w"].staying.tokens == 100
    s.arrive("f", "g", 50)
    assert forwarded(s.ask("f", 60)) == []


def test_heads_of_two_groups_are_both_counted() -> None:
    s = scene(hbm_tokens=100)
    s.arrive("a", "g", 50)
    s.arrive("b", "h", 50)
    assert forwarded(s.ask("a", 60)) == ["a"]
    assert forwarded(s.ask("b", 60)) == []


def test_the_largest_head_of_a_group_counts_and_leaves_with_its_program() -> None:
    s = scene(hbm_tokens=100)
    s.arrive("a", "g", 50)
    s.arrive("b", "g", 20)
    s.ask("a", 60)
    s.ask("b", 25)
    ledger = s.scheduler.workers["w"].staying
    assert ledger.tokens == 10 + 5 + 50
    s.finish("a")
    s.release("a")
    assert ledger.tokens == 25


def test_a_context_shorter_than_the_head_has_no_private_tokens() -> None:
    s = scene(hbm_tokens=100)
    s.arrive("a", "g", 90)
    s.ask("a", 30)
    assert s.scheduler.workers["w"].staying.tokens == 30


def test_a_demoted_program_takes_its_head_along_to_the_cpu_queue() -> None:
    s = scene(hbm_tokens=100, dram_tokens=100, settings=EXACT)
    for name in ("a", "b"):
        s.arrive(name, "g", 40)
    s.step("a", 60, 0.0, 1.0)
    s.step("b", 60, 1.0, 60.0)
    s.at(70.0).ask("hog", 20)
    s.at(80.0).produce("hog", 1)
    assert demoted(s.tick()) == ["a"]
    worker = s.scheduler.workers["w"]
    assert (worker.staying.tokens, worker.cpu.tokens) == (81, 60)


def test_leavers_that_share_a_head_need_room_in_dram_for_it_once() -> None:
    s = scene(hbm_tokens=100, dram_tokens=60)
    for name in ("a", "b"):
        s.arrive(name, "g", 40)
        s.step(name, 50, s.now_s, s.now_s + 1.0)
    assert forwarded(s.at(20.0).ask("caller", 90)) == ["caller"]
    assert s.queues() == {"a": "cpu", "b": "cpu", "caller": "gpu"}
