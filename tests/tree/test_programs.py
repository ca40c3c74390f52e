"""Programs of one worker: the prompts they hold, old epochs, and when they are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtier.ids import Label
from kvtier.tree import programs as module
from kvtier.tree.holders import label_of
from kvtier.tree.programs import Programs

from .plain_tree import Node, RadixTree, num_ends_of


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree()


@pytest.fixture
def programs() -> Programs:
    return Programs()


def run_one(programs: Programs, tree: RadixTree, request: str, tokens: Sequence[int]) -> Node:
    """A request of program p that ends well; returns where it ends in the tree."""
    programs.begin(request, "p", tree.match(tokens))
    end = tree.insert(tokens)
    programs.published(request, end)
    programs.ended(request, well=True)
    return end


def test_a_branch_left_by_compaction_loses_its_label_at_the_next_match(
    programs: Programs, tree: RadixTree
) -> None:
    old = run_one(programs, tree, "r1", (1, 2, 3, 4))
    programs.begin("r2", "p", tree.match((1, 2, 9, 9)))
    assert label_of(old) is Label.INACTIVE
    assert label_of(tree.match((1, 2))) is Label.BUSY


def test_a_branch_stays_unlabelled_when_one_of_two_later_requests_is_aborted(
    programs: Programs, tree: RadixTree
) -> None:
    old = run_one(programs, tree, "r1", (1, 2, 3, 4))
    programs.begin("r2", "p", tree.match((1, 2, 9, 9)))
    programs.begin("r3", "p", tree.match((1, 2, 9, 9)))  # a retry of r2
    programs.ended("r2", well=False)
    assert label_of(old) is Label.INACTIVE
    programs.ended("r3", well=False)
    assert label_of(old) is Label.BUSY


def test_a_branch_is_given_up_by_the_first_later_request_that_ends_well(
    programs: Programs, tree: RadixTree
) -> None:
    old = run_one(programs, tree, "r1", (1, 2, 3, 4))
    programs.begin("r2", "p", tree.match((1, 2, 9, 9)))
    run_one(programs, tree, "r3", (1, 2, 9, 9))
    programs.ended("r2", well=False)
    assert label_of(old) is Label.INACTIVE


@pytest.mark.parametrize("leaves", ["retracted", "emptied"])
def test_a_published_request_holds_its_next_match_once_it_lost_its_place(
    programs: Programs, tree: RadixTree, leaves: str
) -> None:
    run = programs.begin("r1", "p", tree.root)
    end = tree.insert((1, 2, 3))
    programs.published("r1", end)
    front = tree.split(end, 1)
    programs.matched("r1", run, front)
    assert label_of(end) is Label.BUSY
    if leaves == "retracted":
        programs.retracted("r1")
        programs.matched("r1", run, front)
        assert label_of(end) is Label.INACTIVE
    else:
        programs.forget_places()
        front = RadixTree().insert((1,))
        programs.matched("r1", run, front)
    assert label_of(front) is Label.BUSY


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("gone", ["released", "emptied"])
def test_a_request_ends_as_usual_when_the_prompts_before_it_are_gone(
    programs: Programs, tree: RadixTree, gone: str, well: bool
) -> None:
    old = run_one(programs, tree, "r1", (1, 2))
    run = programs.begin("r2", "p", old)
    if gone == "released":
        programs.release(run.program)
    else:
        programs.forget_places()
        tree = RadixTree()
    end = tree.insert((1, 2, 3))
    programs.published("r2", end)
    programs.ended("r2", well=well)
    held = well and gone == "emptied"
    assert label_of(end) is (Label.BUSY if held else Label.INACTIVE)
    assert run.program.finished == ([run.anchor] if well else [])


def test_a_request_that_was_dropped_long_ago_does_not_end_the_one_that_has_its_id_now(
    programs: Programs, tree: RadixTree
) -> None:
    dropped = programs.begin("r1", "p", tree.insert((1, 2)))
    programs.ended("r1", well=False)
    run = programs.begin("r1", "q", tree.match((1, 2)))
    programs.lost("r1", dropped)
    assert run.program.runs == {"r1": run}
    assert label_of(tree.match((1, 2))) is Label.BUSY


def test_a_request_with_the_id_of_one_that_was_dropped_takes_its_place(
    programs: Programs, tree: RadixTree
) -> None:
    dropped = programs.begin("r1", "p", tree.insert((1, 2)))
    run = programs.begin("r1", "q", tree.insert((3,)))
    programs.matched("r1", dropped, tree.match((3,)))
    programs.lost("r1", dropped)
    assert not dropped.program.runs
    assert label_of(tree.match((1, 2))) is Label.INACTIVE
    assert programs.ended("r1", well=True) is run.program


@pytest.mark.parametrize("label", [None, Label.IDLE])
def test_a_released_program_starts_anew(
    programs: Programs, tree: RadixTree, label: Label | None
) -> None:
    end = run_one(programs, tree, "r1", (1, 2))
    program = programs.find("p")
    assert program is not None
    programs.release(program)
    assert (program.label, label_of(end)) == (Label.INACTIVE, Label.INACTIVE)
    programs.begin("r2", "p", tree.match((1, 2)), label=label)
    assert program.label is (label or Label.BUSY)


def test_what_happens_to_a_request_that_names_no_program_changes_nothing(
    programs: Programs, tree: RadixTree
) -> None:
    end = run_one(programs, tree, "r1", (1, 2))
    for request in ("r1", "unknown"):
        programs.published(request, tree.insert((3,)))
        programs.retracted(request)
        assert programs.ended(request, well=True) is None
        assert programs.ended(request, well=False) is None
    assert label_of(end) is Label.BUSY
    assert label_of(tree.match((3,))) is Label.INACTIVE


@pytest.mark.parametrize("epoch", [0, 4])
def test_a_stale_epoch_changes_neither_label_nor_epoch(programs: Programs, epoch: int) -> None:
    assert programs.relabel("p", Label.IDLE, 5)
    assert not programs.relabel("p", Label.INACTIVE, epoch)
    program = programs.find("p")
    assert program is not None
    assert (program.label, program.epoch) == (Label.IDLE, 5)


def test_a_stale_label_of_a_request_does_not_hinder_the_request(
    programs: Programs, tree: RadixTree
) -> None:
    programs.relabel("p", Label.IDLE, 5)
    run = programs.begin("r1", "p", tree.insert((1,)), label=Label.BUSY, epoch=4)
    assert run.program.runs == {"r1": run}
    assert label_of(tree.match((1,))) is Label.IDLE


class TestManyPrograms:
    """Beyond a bound, programs that hold nothing are forgotten."""

    @pytest.fixture(autouse=True)
    def _bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_MAX_PROGRAMS", 8)

    @staticmethod
    def known(programs: Programs) -> list[str]:
        return [program.name for program in programs]

    def test_those_with_nothing_are_forgotten_and_the_last_ones_are_kept(
        self, programs: Programs
    ) -> None:
        for index in range(1000):
            programs.relabel(f"p{index}", Label.IDLE, 1)
            assert len(self.known(programs)) <= 8
        assert self.known(programs)[-4:] == ["p996", "p997", "p998", "p999"]

    @pytest.mark.parametrize("use", ["relabel", "begin"])
    def test_a_program_in_use_outlives_those_unused_for_longer(
        self, programs: Programs, tree: RadixTree, use: str
    ) -> None:
        for index in range(8):
            programs.relabel(f"p{index}", Label.IDLE, 1)
        if use == "relabel":
            programs.relabel("p0", Label.IDLE, None)
        else:
            programs.begin("r1", "p0", tree.root)
            programs.ended("r1", well=False)
        programs.relabel("new", Label.IDLE, 1)
        assert self.known(programs) == ["p5", "p6", "p7", "p0", "new"]

    @pytest.mark.parametrize("well", [None, True])
    def test_a_program_that_runs_or_holds_pages_is_never_forgotten(
        self, programs: Programs, tree: RadixTree, well: bool | None
    ) -> None:
        for index in range(20):
            programs.begin(f"r{index}", f"p{index}", tree.insert((index,)))
            if well:
                programs.ended(f"r{index}", well=True)
        for index in range(100):
            programs.relabel(f"empty{index}", Label.IDLE, 1)
        assert {f"p{index}" for index in range(20)} < set(self.known(programs))
        assert len(self.known(programs)) <= 24

    @pytest.mark.parametrize(
        "give_up",
        [
            lambda programs, tree, program: programs.release(program),
            lambda programs, tree, program: tree.delete(tree.match((1, 2))),
            lambda programs, tree, program: programs.forget_places(),
        ],
        ids=["released", "evicted", "flushed"],
    )
    def test_a_program_that_lost_its_pages_can_be_forgotten(
        self,
        programs: Programs,
        tree: RadixTree,
        give_up: Callable[[Programs, RadixTree, module.Program], None],
    ) -> None:
        run_one(programs, tree, "r1", (1, 2))
        program = programs.find("p")
        assert program is not None
        give_up(programs, tree, program)
        for index in range(20):
            programs.relabel(f"p{index}", Label.IDLE, 1)
        assert programs.find("p") is None


@pytest.mark.parametrize("well", [True, False])
def test_a_long_life_leaves_one_prompt_and_no_request(
    programs: Programs, tree: RadixTree, well: bool
) -> None:
    run_one(programs, tree, "first", (0,))
    for index in range(300):
        programs.begin(f"r{index}", "p", tree.match((index,)))
        programs.published(f"r{index}", tree.insert((index,)))
        programs.ended(f"r{index}", well=well)
    program = programs.find("p")
    assert program is not None
    assert len(program.finished) == 1
    assert sum(map(num_ends_of, tree.nodes())) == 1
    assert not program.runs


def test_overlapping_requests_leave_no_more_prompts_than_ran_at_once(
    programs: Programs, tree: RadixTree
) -> None:
    programs.begin("r0", "p", tree.insert((0,)))
    for index in range(1, 100):
        programs.begin(f"r{index}", "p", tree.insert((index,)))
        programs.ended(f"r{index - 1}", well=True)
        assert sum(map(num_ends_of, tree.nodes())) <= 3
