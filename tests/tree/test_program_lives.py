"""Random lives of programs in one tree: all nodes keep the holders that the rules give them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.ids import Label
from kvtier.integration.sglang.residency import held_nodes, private_in_hbm
from kvtier.tree.holders import label_of, num_holders
from kvtier.tree.programs import Programs, Run

from .known_holders import Holders
from .plain_tree import Path, RadixTree, counts_of, num_ends_of

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
NAME = st.sampled_from(("p0", "p1"))
REQUEST = st.sampled_from(("a", "b", "c"))
LABEL = st.sampled_from(Label)
EPOCH_STEP = st.none() | st.sampled_from((0, 1, -1))
INDEX = st.integers(0, 50)
PHASES = ("matched", "published", "retracted")


def busiest(counts: Sequence[int]) -> Label:
    """The label of a node with so many INACTIVE, IDLE and BUSY holders."""
    _, idle, busy = counts
    return Label.BUSY if busy else Label.IDLE if idle else Label.INACTIVE


def labels_by_token(tree: RadixTree) -> dict[Path, tuple[Label, int]]:
    """Label and number of holders of every token in the tree, however nodes divide it."""
    found = {}
    for node in tree.nodes():
        end = len(node.path)
        for length in range(end - len(node.key) + 1, end + 1):
            found[node.path[:length]] = (label_of(node), num_holders(node))
    return found


class Lives(RuleBasedStateMachine):
    """Rules are what SGLang and the control channel do; each is told to the oracle as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.programs = Programs()
        self.oracle = Holders()
        self.epochs: dict[str, int] = {}
        self.begun: list[tuple[str, Run]] = []
        self.current: dict[str, Run] = {}

    @rule(request=REQUEST, name=NAME, label=st.none() | LABEL, step=EPOCH_STEP, tokens=TOKENS)
    def look_up(
        self, request: str, name: str, label: Label | None, step: int | None, tokens: list[int]
    ) -> None:
        node = self.tree.match(tokens)
        if self.oracle.running(request) is not None:
            event("matched again")
            self.programs.matched(request, self.current[request], node)
            self.oracle.matched(request, node.path)
            return
        epoch = self.next_epoch(name, step)
        run = self.programs.begin(request, name, node, label=label, epoch=epoch)
        self.begun.append((request, run))
        self.current[request] = run
        if label is not None:
            self.oracle.relabel(name, label, epoch)
        self.oracle.begin(request, name, node.path, labelled=label is not None)

    def next_epoch(self, name: str, step: int | None) -> int | None:
        return None if step is None else max(0, self.epochs.get(name, 0) + step)

    def some_request(self, index: int) -> str:
        running = self.oracle.all_running()
        return running[index % len(running)]

    @rule(name=NAME, tokens=TOKENS, well=st.none() | st.just(True))
    def serve(self, name: str, tokens: list[int], well: bool | None) -> None:
        """A new request is published; it goes on, or ends well."""
        request = f"r{len(self.begun)}"
        self.look_up(request, name, None, None, tokens)
        self.publish_as(request, tokens)
        if well:
            self.programs.ended(request, well=True)
            self.oracle.ended(request, well=True)

    @precondition(lambda self: self.oracle.all_running())
    @rule(index=INDEX, tokens=TOKENS)
    def publish(self, index: int, tokens: list[int]) -> None:
        self.publish_as(self.some_request(index), tokens)

    def publish_as(self, request: str, tokens: list[int]) -> None:
        node = self.tree.insert(tokens)
        self.programs.published(request, node)
        self.oracle.published(request, node.path)

    @precondition(lambda self: self.oracle.all_running())
    @rule(index=INDEX)
    def retract(self, index: int) -> None:
        request = self.some_request(index)
        self.programs.retracted(request)
        self.oracle.retracted(request)

    @precondition(lambda self: self.oracle.all_running())
    @rule(index=INDEX, well=st.booleans())
    def end(self, index: int, well: bool) -> None:
        request = self.some_request(index)
        name = self.oracle.running(request)
        ended = self.programs.ended(request, well=well)
        assert ended is not None
        assert ended.name == name
        self.oracle.ended(request, well)

    @precondition(lambda self: self.begun)
    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        request, run = self.begun[index % len(self.begun)]
        alive = [r for known in self.programs for r in known.runs.values()]
        event("lost" if run in alive else "lost after it ended")
        self.programs.lost(request, run)
        if run in alive:
            self.oracle.ended(request, well=False)

    @rule(name=NAME, label=LABEL, step=EPOCH_STEP)
    def relabel(self, name: str, label: Label, step: int | None) -> None:
        epoch = self.next_epoch(name, step)
        done = self.oracle.relabel(name, label, epoch)
        event("relabelled" if done else "stale epoch")
        assert self.programs.relabel(name, label, epoch) is done

    @rule(name=NAME)
    def release(self, name: str) -> None:
        program = self.programs.find(name)
        if program is not None:
            self.programs.release(program)
            self.oracle.release(name)

    @precondition(lambda self: self.tree.root.children)
    @rule(index=INDEX)
    def delete(self, index: int) -> None:
        leaves = self.tree.leaves()
        leaf = leaves[index % len(leaves)]
        assert leaf.parent is not None
        event("a held leaf is deleted" if num_holders(leaf) else "a free leaf is deleted")
        self.tree.delete(leaf)
        self.oracle.deleted(leaf.path, leaf.parent.path)

    @rule(kind=st.sampled_from(("insert", "split", "move")), index=INDEX, tokens=TOKENS)
    def change_the_tree(self, kind: str, index: int, tokens: list[int]) -> None:
        """Somebody without a program inserts, a node is split, or leaves or enters HBM."""
        nodes = list(self.tree.nodes())
        if kind == "insert" or not nodes:
            self.tree.insert(tokens)
            return
        node = nodes[index % len(nodes)]
        if kind == "move":
            node.evicted = not node.evicted
        elif len(node.key) > 1:
            self.tree.split(node, 1 + index % (len(node.key) - 1))

    @rule(luck=st.integers(0, 2))
    def empty_the_tree(self, luck: int) -> None:
        if luck < 2:  # rare, else there is little in the tree
            return
        self.tree = RadixTree()
        self.programs.forget_places()
        self.oracle.emptied()

    @rule(
        name=NAME,
        phases=st.lists(st.tuples(st.sampled_from(PHASES), TOKENS), max_size=4),
        lost=st.booleans(),
        tokens=TOKENS,
    )
    def abort_one(
        self, name: str, phases: list[tuple[str, list[int]]], lost: bool, tokens: list[int]
    ) -> None:
        """With nothing else in between, every token is held and labelled as before."""
        known = self.oracle.programs.get(name)
        if known is not None and known.released:
            return  # it starts anew
        before = labels_by_token(self.tree)
        run = self.programs.begin("aborted", name, self.tree.match(tokens))
        for phase, more in phases:
            if phase == "matched":
                self.programs.matched("aborted", run, self.tree.match(more))
            elif phase == "published":
                self.programs.published("aborted", self.tree.insert(more))
            else:
                self.programs.retracted("aborted")
        if lost:
            self.programs.lost("aborted", run)
        else:
            self.programs.ended("aborted", well=False)
        nobody = (Label.INACTIVE, 0)
        after = labels_by_token(self.tree)
        assert after == {path: before.get(path, nobody) for path in after}
        self.oracle.begin("aborted", name, ())
        self.oracle.ended("aborted", well=False)

    @invariant()
    def all_is_as_the_oracle_says(self) -> None:
        self.check_nodes()
        self.check_root_and_deleted_nodes()
        self.check_programs()
        self.check_residency()

    def check_nodes(self) -> None:
        for node in self.tree.nodes():
            counts = self.oracle.counts(node.path)
            assert counts_of(node) == counts
            assert num_holders(node) == sum(counts)
            assert label_of(node) is busiest(counts)
            assert num_ends_of(node) == self.oracle.num_ends(node.path)

    def check_root_and_deleted_nodes(self) -> None:
        for node in (self.tree.root, *self.tree.deleted):
            assert getattr(node, "holding", None) is None

    def check_programs(self) -> None:
        found = {program.name: program for program in self.programs}
        assert found.keys() == self.oracle.programs.keys()
        for name, known in self.oracle.programs.items():
            program = found[name]
            assert (program.label, program.epoch) == (known.label, known.epoch)
            assert program.epoch >= self.epochs.get(name, 0)
            assert program.runs.keys() == known.running.keys()
            idle = not known.running and all(not p.path for p in known.finished)
            assert program.holds_nothing is idle
            self.epochs[name] = program.epoch

    def check_residency(self) -> None:
        for program in self.programs:
            held = held_nodes(program)
            private = {node: self.oracle.private(program.name, node.path) for node in held}
            assert held == private
            nodes = list(self.tree.nodes())
            others = [node for node in nodes if node not in held]
            assert all(self.oracle.private(program.name, node.path) is None for node in others)
            rank = {node: place for place, node in enumerate(held)}
            assert all(rank[node] < rank.get(node.parent, len(rank)) for node in held)
            in_hbm = [node for node in held if private[node] and not node.evicted]
            assert list(private_in_hbm(program)) == in_hbm


@pytest.mark.timeout(400)  # finding the shortest way to a failure takes minutes
def test_holders_labels_and_residency_follow_every_order_of_events() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=150,
            stateful_step_count=100,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
        ),
    )
