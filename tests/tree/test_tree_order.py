"""Who leaves a tier first: what evict does equals a sort of all candidates, each time anew."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.ids import Label
from kvtier.tree.holders import label_of
from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import Node, State, Tier
from kvtier.tree.tree import RadixTree

SEED = st.integers(0, 2**32)
PAGE_SIZE = st.sampled_from((1, 16))
HBM_ORDER = (Label.INACTIVE, Label.IDLE, Label.BUSY)


def random_tree(seed: int, page_size: int) -> RadixTree:
    """Prompts of labelled programs; some nodes are in both tiers, some in DRAM, some protected."""
    choose = random.Random(seed)
    tree, made = RadixTree(page_size), 0
    for step in range(choose.randrange(1, 16)):
        kinds = choose.choices(range(2), k=choose.randrange(1, 9))
        tokens = [token for kind in kinds for token in [kind] * page_size]
        pages = range(made, made + len(kinds))
        made += len(kinds)
        node = tree.insert(tokens, list(pages)).node
        name, match = f"p{choose.randrange(6)}", tree.match(tokens)
        label = choose.choice((None, *Label))
        tree.begin(f"r{step}", name, match, label=label)
        if choose.random() < 0.6:
            tree.end(f"r{step}", well=choose.random() < 0.8)
        sources = [n for n in tree.nodes() if n.states == [State.PRESENT, State.ABSENT]]
        for source in choose.sample(sources, choose.randrange(min(3, len(sources) + 1))):
            if source.dead:
                continue  # it was joined with the one copied before
            count = tree.num_pages(source)
            tree.finish(
                tree.copy_to(Tier.DRAM, [source], list(range(made, made + count))), well=True
            )
            made += count
        tree.evict(Tier.HBM, choose.randrange(4))
        if choose.random() < 0.15 and not node.dead:
            tree.protect(node)
        tree.match(tokens[: choose.randrange(len(tokens) + 1)])
    check_integrity(tree)
    return tree


def key_of(node: Node, tier: Tier) -> tuple[int, int, int, int] | None:
    """The documented key; None for a node that cannot leave the tier at all."""
    label = label_of(node)
    duplicate = tier is Tier.DRAM and node.states[Tier.HBM] is not State.ABSENT
    before_others = any(child.states[tier] is not State.ABSENT for child in node.children.values())
    if node.states[tier] is not State.PRESENT:
        return None
    if not duplicate and (node.locks or before_others):
        return None
    if tier is Tier.HBM:
        rank = HBM_ORDER.index(label)
    elif label is Label.INACTIVE:
        rank = 0
    elif duplicate:
        rank = 1 if label is Label.BUSY else 2
    else:
        rank = 3 if label is Label.BUSY else 4
    return rank, node.last_access, -node.start, node.id


def first_page(tree: RadixTree, tier: Tier) -> int | None:
    """The page at the end of the first of all candidates."""
    found = [(key, node) for node in tree.nodes() if (key := key_of(node, tier)) is not None]
    if not found:
        return None
    _, first = min(found)
    return int(first.pages(tier, tree.page_size)[-1])


@pytest.mark.parametrize("tier", Tier)
@settings(max_examples=150, derandomize=True)
@given(seed=SEED, page_size=PAGE_SIZE)
def test_pages_leave_one_by_one_in_the_documented_order(
    tier: Tier, seed: int, page_size: int
) -> None:
    tree = random_tree(seed, page_size)
    while (expected := first_page(tree, tier)) is not None:
        evicted = tree.evict(tier, 1)
        assert evicted is not None
        assert evicted.ids(tier).tolist() == [expected]
    assert tree.pages[tier].evictable == 0
    assert tree.evict(tier, 1) is None
    check_integrity(tree)


@pytest.mark.parametrize("tier", Tier)
@settings(max_examples=150, derandomize=True)
@given(seed=SEED, page_size=PAGE_SIZE, count=st.integers(1, 12))
def test_many_pages_leave_as_they_would_one_by_one(
    tier: Tier, seed: int, page_size: int, count: int
) -> None:
    tree = random_tree(seed, page_size)
    count = min(count, tree.pages[tier].evictable)
    other = copy.deepcopy(tree)
    at_once = tree.evict(tier, count)
    one_by_one = [other.evict(tier, 1) for _ in range(count)]
    assert at_once is not None
    for t in Tier:
        ids = [page_id for one in one_by_one if one is not None for page_id in one.ids(t)]
        assert sorted(at_once.ids(t)) == sorted(ids)
    assert tree.pages == other.pages


@pytest.mark.parametrize("tier", Tier)
@settings(max_examples=60, derandomize=True)
@given(seed=SEED, page_size=PAGE_SIZE)
def test_more_pages_than_may_leave_are_refused_and_nothing_leaves(
    tier: Tier, seed: int, page_size: int
) -> None:
    tree = random_tree(seed, page_size)
    before = (tree.pages[tier].evictable, [n.id for n in tree.nodes()])
    assert tree.evict(tier, before[0] + 1) is None
    assert (tree.pages[tier].evictable, [n.id for n in tree.nodes()]) == before


def two_prompts(first: Label, second: Label) -> RadixTree:
    """Pages 0 and 1 of a program, then page 2 of another, each with its label."""
    tree = RadixTree(1)
    for name, tokens, pages, label in (("p", [1, 2], [0, 1], first), ("q", [3], [2], second)):
        tree.insert(tokens, pages)
        tree.begin(name, name, tree.match(tokens), label=label)
        tree.end(name, well=True)
    return tree


def to_dram(tree: RadixTree, *, keep: bool) -> None:
    """All nodes get copies under the same page ids; they leave HBM unless they are kept."""
    for node in list(tree.nodes()):
        pages = node.pages(Tier.HBM, tree.page_size).copy()
        tree.finish(tree.copy_to(Tier.DRAM, [node], pages), well=True)
    if not keep:
        tree.evict(Tier.HBM, tree.pages[Tier.HBM].total)


@pytest.mark.parametrize("busier", [(Label.IDLE, Label.INACTIVE), (Label.BUSY, Label.IDLE)])
def test_the_less_busy_leave_hbm_first_however_recent(busier: tuple[Label, Label]) -> None:
    evicted = two_prompts(*busier).evict(Tier.HBM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.HBM).tolist() == [2]


@pytest.mark.parametrize(
    ("later", "sooner"),
    [
        (Label.BUSY, Label.INACTIVE),
        (Label.IDLE, Label.INACTIVE),
        (Label.IDLE, Label.BUSY),
    ],
)
def test_sole_copies_leave_dram_inactive_then_busy_then_idle(later: Label, sooner: Label) -> None:
    tree = two_prompts(later, sooner)
    to_dram(tree, keep=False)
    evicted = tree.evict(Tier.DRAM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.DRAM).tolist() == [2]


def test_inside_a_class_the_least_recently_used_leaves_first_and_its_end_before_its_front() -> None:
    tree = two_prompts(Label.IDLE, Label.IDLE)
    tree.match([1, 2])
    left = [tree.evict(Tier.HBM, 1) for _ in range(3)]
    assert [one.ids(Tier.HBM).tolist() for one in left if one is not None] == [[2], [1], [0]]


def test_a_label_that_falls_or_rises_moves_pages_in_the_order() -> None:
    tree = two_prompts(Label.BUSY, Label.IDLE)
    to_dram(tree, keep=False)
    tree.relabel("q", Label.BUSY)
    tree.relabel("p", Label.IDLE)
    evicted = tree.evict(Tier.DRAM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.DRAM).tolist() == [2]


def test_a_waiting_request_makes_idle_pages_leave_dram_sooner() -> None:
    """A BUSY sole copy goes before an IDLE one, though its label is the busier one."""
    tree = two_prompts(Label.IDLE, Label.IDLE)
    to_dram(tree, keep=False)
    assert tree.evict(Tier.DRAM, 1) is not None
    tree.begin("waits", "busy", tree.match([9]), label=Label.BUSY)
    tree.rematch("waits", tree.match([3]))
    check_integrity(tree)
    evicted = tree.evict(Tier.DRAM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.DRAM).tolist() == [2]


def test_pages_of_a_request_that_the_engine_dropped_leave_sooner() -> None:
    """A later request, of another program, has its id by now."""
    tree = RadixTree(1)
    tree.insert([1], [0])
    tree.begin("r", "p", tree.match([1]), label=Label.BUSY)
    tree.insert([2], [1])
    assert tree.evict(Tier.HBM, 1) is not None
    tree.insert([3], [2])
    tree.begin("s", "q", tree.match([3]), label=Label.IDLE)
    tree.begin("r", "q", tree.match([9]), label=Label.IDLE)
    check_integrity(tree)
    evicted = tree.evict(Tier.HBM, 1)
    assert evicted is not None
    assert evicted.ids(Tier.HBM).tolist() == [0]
