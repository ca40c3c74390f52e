"""Long prompts, emptied trees, chains that are joined, and input that does not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.errors import TreeError
from kvtier.ids import Label
from kvtier.tree.counters import TierPages
from kvtier.tree.integrity import check_integrity
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, Tier
from kvtier.tree.tree import Match, RadixTree

PAGE_SIZES = (1, 16, 64)
LONG = 100_000


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_prompt_of_a_hundred_thousand_tokens_is_one_node(
    page_size: int, kind: Callable[..., Any]
) -> None:
    tree, pages = RadixTree(page_size), LONG // page_size
    tokens = kind(range(LONG))
    node = tree.insert(tokens, np.arange(pages)).node
    whole = pages * page_size
    assert tree.match(tokens) == Match(node, whole, whole)
    assert tree.num_nodes == 1
    evicted = tree.evict(Tier.HBM, pages // 2)
    assert evicted is not None
    assert sorted(evicted.ids(Tier.HBM)) == list(range(pages - pages // 2, pages))
    half = (pages - pages // 2) * page_size
    assert tree.match(tokens)[1:] == (half, half)
    other = np.arange(LONG) % (half - page_size)
    assert tree.match(other).tokens == half - page_size
    check_integrity(tree)


# --- an emptied tree ---


def fill(tree: RadixTree) -> list[int]:
    """Branches of two programs, some of them copied; returns how long matches were."""
    found, page = [], 0
    for turn in range(12):
        name = f"p{turn % 2}"
        tokens = [turn % 2] * 4 + [turn % 3] * turn + [turn]
        match = tree.match(tokens)
        tree.begin(f"r{turn}", name, match, label=list(Label)[turn % 3])
        pages = list(range(page, page + len(tokens)))
        inserted = tree.insert(tokens, pages, after=match, request=f"r{turn}")
        tree.publish(f"r{turn}", inserted.node)
        tree.end(f"r{turn}", well=turn % 4 > 0)
        page += len(tokens)
        found += [match.tokens, tree.num_nodes]
    return found


def demote_some(tree: RadixTree) -> None:
    for at, node in enumerate([*tree.nodes()][::2]):
        pages = np.arange(tree.num_pages(node)) + 1000 * at
        tree.finish(tree.copy_to(Tier.DRAM, [node], pages), well=at % 3 > 0)


def empty(tree: RadixTree, order: tuple[Tier, Tier]) -> None:
    for tier in order:
        assert tree.evict(tier, tree.pages[tier].total) is not None


def all_nodes() -> list[Node]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Node]


@pytest.mark.parametrize("order", [(Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("copied", [False, True])
def test_a_tree_emptied_to_its_root_is_as_it_was_first(
    order: tuple[Tier, Tier], rounds: int, copied: bool
) -> None:
    before = {id(node) for node in all_nodes()}
    tree, first = RadixTree(1), None
    for _ in range(rounds):
        found = fill(tree)
        assert found == (first or found)
        first = found
        if copied:
            demote_some(tree)
        empty(tree, order)
        for name in ("p0", "p1"):
            tree.release(name)
        assert list(tree.nodes()) == []
        assert tree.num_nodes == 0
        assert tree.pages == dict.fromkeys(Tier, TierPages())
        check_integrity(tree)
    assert tree.roots == {}
    assert [node for node in all_nodes() if id(node) not in before] == []
    assert [tree.queues[tier].pop() for tier in Tier] == [None, None]


# --- chains ---


def look_up(tree: RadixTree, tokens: list[int]) -> None:
    """Requests that come to nothing find parts of the prompt."""
    for cut in (1, 2, 3):
        tree.match(tokens[: len(tokens) * cut // 4])


def abort(tree: RadixTree, tokens: list[int]) -> None:
    tree.begin("aborted", "p", tree.match(tokens[: len(tokens) // 2]))
    tree.end("aborted", well=False)


def branch(tree: RadixTree, tokens: list[int]) -> None:
    """Another program's branch comes and goes."""
    half = tokens[: len(tokens) // 2]
    match = tree.match(half)
    tree.insert([*half, 2**31 - 1], [10**6], first_page=match.tokens)
    assert tree.evict(Tier.HBM, 1) is not None


def nothing(tree: RadixTree, tokens: list[int]) -> None:
    pass


@pytest.mark.parametrize("between", [nothing, look_up, abort, branch])
@pytest.mark.parametrize("protect", ["never", "until it ends", "beyond its end"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_prompt_of_one_program_is_one_node_after_each_turn(
    between: Callable[[RadixTree, list[int]], None], protect: str, chunks: int
) -> None:
    tree, tokens = RadixTree(1), list[int]()
    for turn in range(5):
        between(tree, tokens)
        match = tree.match(tokens)
        tree.begin("r", "p", match)
        node = match.node
        if protect != "never":
            tree.protect(node)
        for _ in range(chunks):
            tokens = [*tokens, turn, turn + 1, turn + 2]
            pages = list(range(match.tokens, len(tokens)))
            new = tree.insert(tokens, pages, first_page=match.tokens, after=match, request="r").node
            if protect != "never":
                tree.protect(new)
                tree.unprotect(node)
            node = new
            tree.publish("r", node)
            match = Match(node, node.end, node.end)
        if protect == "until it ends":
            tree.unprotect(node)
        tree.end("r", well=True)
        if protect == "beyond its end":
            tree.unprotect(node)
        assert [n.tokens.tolist() for n in tree.nodes()] == [tokens]
        check_integrity(tree)


@pytest.mark.parametrize("act", ["publish", "rematch"])
def test_the_node_that_a_request_was_just_told_of_can_be_protected(act: str) -> None:
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    tree.begin("r", "p", tree.match([1, 2]))
    match = tree.match([1, 2, 3, 4])
    if act == "publish":
        tree.publish("r", match.node)
    else:
        tree.rematch("r", match)
    tree.protect(match.node)
    assert tree.pages[Tier.HBM] == TierPages(protected=4, pinned=4)
    check_integrity(tree)


# --- gaps ---


def test_an_eviction_frees_no_more_than_it_was_asked_for_where_the_path_has_a_gap() -> None:
    """[3] was brought back to HBM alone, and [2] before it is in DRAM alone."""
    tree = RadixTree(1)
    tree.insert([1], [0])
    tree.begin("r", "p", tree.match([1]))
    last = tree.insert([1, 2, 3], [0, 1, 2]).node
    middle = tree.match([1, 2]).node
    tree.finish(tree.copy_to(Tier.DRAM, [middle, last], [0, 1]), well=True)
    assert tree.evict(Tier.HBM, 2) is not None
    tree.end("r", well=False)
    tree.match([1, 2])
    last = tree.match([1, 2, 3]).node
    tree.finish(tree.copy_to(Tier.HBM, [last], [7]), well=True)
    evicted = tree.evict(Tier.HBM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.HBM).tolist() == [7]
    check_integrity(tree)


def test_an_eviction_from_dram_frees_no_more_than_it_was_asked_for_where_dram_has_a_gap() -> None:
    """[2] is in HBM alone; [1], which is BUSY, is before the IDLE [3] in the order of DRAM."""
    tree = RadixTree(1)
    tree.insert([1], [0])
    tree.begin("r", "busy", tree.match([1]), label=Label.BUSY)
    last = tree.insert([1, 2, 3], [0, 1, 2]).node
    tree.begin("s", "idle", tree.match([1, 2, 3]), label=Label.IDLE)
    middle = tree.match([1, 2]).node
    first = tree.match([1]).node
    tree.finish(tree.copy_to(Tier.DRAM, [first, middle, last], [0, 1, 2]), well=True)
    assert tree.evict(Tier.HBM, 3) is not None
    middle = tree.match([1, 2]).node
    tree.finish(tree.copy_to(Tier.HBM, [middle], [5]), well=True)
    assert tree.evict(Tier.DRAM, 1).ids(Tier.DRAM).tolist() == [1]
    evicted = tree.evict(Tier.DRAM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.DRAM).size == 1
    check_integrity(tree)


# --- matches that are out of date ---


def test_an_insert_after_an_old_match_does_not_go_on_in_another_prompt() -> None:
    """The end of the matched prompt was evicted, and another one has its place since."""
    tree = RadixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    old = tree.match([1, 2, 3])
    assert tree.evict(Tier.HBM, 1) is not None
    tree.insert([1, 2, 8], [0, 1, 3], first_page=0)
    with pytest.raises(TreeError):
        tree.insert([1, 2, 3, 4], [4], first_page=3, after=old)
    assert tree.match([1, 2, 8, 4]).tokens == 3
    assert tree.insert([1, 2, 3, 4], [5, 6, 7, 9], after=old).duplicates.tolist() == [5, 6]
    check_integrity(tree)


def test_an_insert_after_an_old_match_is_refused_where_hbm_has_a_gap_by_now() -> None:
    tree = RadixTree(1)
    tree.insert([1], [0])
    tree.begin("r", "p", tree.match([1]))
    last = tree.insert([1, 2], [0, 1]).node
    front, old = last.parent, tree.match([1, 2])
    assert front is not None
    tree.finish(tree.copy_to(Tier.DRAM, [front, last], [0, 1]), well=True)
    assert tree.evict(Tier.HBM, 2) is not None
    tree.finish(tree.copy_to(Tier.HBM, [last], [5]), well=True)
    with pytest.raises(TreeError):
        tree.insert([1, 2, 3], [6], first_page=2, after=old)
    check_integrity(tree)


def test_an_insert_goes_on_only_in_the_namespace_of_its_match() -> None:
    tree = RadixTree(page_size=4)
    one, two = Namespace(tenant="one"), Namespace(tenant="two")
    tree.insert(range(4), [0], one)
    old = tree.match(range(4), one)
    with pytest.raises(TreeError, match="another namespace"):
        tree.insert(range(8), [1], two, first_page=1, after=old)
    other = RadixTree(page_size=4)
    with pytest.raises(TreeError, match="another tree"):
        other.insert(range(8), [1], one, first_page=1, after=old)
    assert tree.match(range(8), one).tokens == 4
    assert tree.match(range(8), two).tokens == other.num_nodes == 0
    check_integrity(tree)


def test_a_page_named_twice_is_refused() -> None:
    tree = RadixTree(page_size=4)
    with pytest.raises(TreeError, match="named twice"):
        tree.insert(range(8), [7, 7])
    node = tree.insert(range(8), [7, 8]).node
    with pytest.raises(TreeError, match="named twice"):
        tree.copy_to(Tier.DRAM, [node], [1, 1])
    check_integrity(tree)


def test_wrong_kinds_are_refused_before_anything_changes() -> None:
    tree = RadixTree(page_size=4)
    tree.insert(range(8), [0, 1])
    for tier, count in ((Tier.HBM, 1.5), (0, 1), ("HBM", 1), (Tier.HBM, -1)):
        with pytest.raises(TreeError, match="pass"):
            tree.evict(tier, count)  # type: ignore[arg-type]
    with pytest.raises(TreeError, match="pass 0 or more"):
        tree.first_to_leave(1.5)  # type: ignore[arg-type]
    with pytest.raises(TreeError, match="label 'junk'; use one of busy"):
        tree.begin("r", "p", tree.match(range(8)), label="junk")  # type: ignore[arg-type]
    with pytest.raises(TreeError, match="label 'junk'"):
        tree.relabel("new", "junk")  # type: ignore[arg-type]
    tree.begin("r", "p", tree.match(range(8)))
    tree.end("r", well=True)
    with pytest.raises(TreeError, match="whole number"):
        RadixTree(1.5)  # type: ignore[arg-type]
    assert tree.evict(Tier.HBM, 2) is not None
    check_integrity(tree)


def test_a_copy_is_finished_by_its_own_tree() -> None:
    tree, other = RadixTree(page_size=4), RadixTree(page_size=4)
    copy = tree.copy_to(Tier.DRAM, [tree.insert(range(8), [0, 1]).node], [0, 1])
    with pytest.raises(TreeError, match="another tree's"):
        other.finish(copy, well=True)
    tree.finish(copy, well=True)
    check_integrity(tree)
    check_integrity(other)


def test_a_long_line_of_children_is_released_at_once() -> None:
    tree = RadixTree(page_size=4)
    for number in range(3_000):
        tree.adopt(f"p{number + 1}", f"p{number}")
    tree.release("p0")
