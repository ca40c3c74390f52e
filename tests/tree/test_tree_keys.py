"""Keys and sharing: who shares pages with whom, and how often a waiting request counts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.ids import Label
from kvtier.tree.holders import label_of, num_holders
from kvtier.tree.integrity import check_integrity
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Tier
from kvtier.tree.tree import RadixTree

PAGE_SIZES = (1, 16, 64)
PART = st.text("ab/:-\0", max_size=3)
NAMESPACE = st.builds(Namespace, model=PART, weights=PART, adapter=PART, tenant=PART)


def lengths(page_size: int) -> list[int]:
    return sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size})


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("first", range(6))
def test_prompts_around_a_page_are_kept_in_whole_pages(page_size: int, first: int) -> None:
    sizes = lengths(page_size)
    tree, held = RadixTree(page_size), 0
    for size in sizes[first % len(sizes) :] + sizes[: first % len(sizes)]:
        whole, tokens = size // page_size, list(range(size))
        known = min(held, whole) * page_size
        assert tree.match(tokens)[1:] == (known, known)
        node, duplicates, _ = tree.insert(tokens, list(range(100, 100 + whole)))
        assert (node.end, duplicates.size) == (whole * page_size, min(held, whole))
        held = max(held, whole)
        assert tree.match(tokens)[1:] == (whole * page_size, whole * page_size)
        assert tree.pages[Tier.HBM].total == held
        check_integrity(tree)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_prompt_shorter_than_a_page_takes_no_page_and_holds_none(
    page_size: int, size: int
) -> None:
    tree = RadixTree(page_size)
    match = tree.match([1] * size)
    tree.begin("r", "p", match)
    node = tree.insert([1] * size, [], after=match, request="r").node
    tree.publish("r", node)
    tree.end("r", well=True)
    assert (match.tokens, tree.num_nodes, tree.pages[Tier.HBM].total) == (0, 0, 0)
    check_integrity(tree)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("differs_at", [0, 1, -1])
def test_pages_that_differ_in_one_token_are_different_pages(
    page_size: int, differs_at: int
) -> None:
    tree = RadixTree(page_size)
    common, page = [5] * page_size, [7] * page_size
    other = list(page)
    other[differs_at] = 8
    tree.insert(common + page, [0, 1])
    assert tree.match(common + other).tokens == page_size
    tree.insert(common + other, [2, 3])
    for tokens, end in ((page, 1), (other, 3)):
        node = tree.match(common + tokens).node
        assert node.end == 2 * page_size
        assert node.pages(Tier.HBM, page_size).tolist() == [end]
    check_integrity(tree)


@settings(max_examples=200, derandomize=True)
@given(names=st.lists(NAMESPACE, min_size=2, max_size=8, unique=True))
def test_no_two_namespaces_share_a_page(names: list[Namespace]) -> None:
    tree = RadixTree(1)
    for at, name in enumerate(names):
        assert tree.match([1, 2], name).tokens == 0
        node, duplicates, _ = tree.insert([1, 2], [2 * at, 2 * at + 1], name)
        assert duplicates.size == 0
        assert node.pages(Tier.HBM, 1).tolist() == [2 * at, 2 * at + 1]
    assert tree.pages[Tier.HBM].total == 2 * len(names)
    check_integrity(tree)


@pytest.mark.parametrize(("one", "other"), [*combinations(Namespace._fields, 2)])
def test_the_same_value_as_two_kinds_of_key_is_two_namespaces(one: str, other: str) -> None:
    """A base model's request must not get what was computed under an adapter."""
    tree = RadixTree(1)
    tree.insert([1], [0], Namespace(**{one: "x"}))
    assert tree.match([1], Namespace(**{other: "x"})).tokens == 0
    assert tree.match([1]).tokens == 0
    assert tree.match([1], Namespace(**{one: "x"})).tokens == 1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kept", [14_816, 14_820, 14_815, 255, 256, 257])
def test_a_copy_that_ends_inside_a_page_of_another_size_overwrites_nothing(
    page_size: int, kept: int
) -> None:
    """A store with other pages knows more or fewer tokens than whole pages of ours."""
    tree = RadixTree(page_size)
    tokens = np.arange(kept, dtype=np.int32)
    ours = kept // page_size
    mine = tree.insert(tokens, np.arange(ours)).node.pages(Tier.HBM, page_size).tolist()
    chunk = 256
    stored = np.concatenate([tokens[: kept // chunk * chunk], np.full(chunk, 9)])
    theirs = stored.size // page_size
    first = tree.match(stored).hbm_tokens // page_size
    fresh = np.arange(10**6, 10**6 + theirs - first)
    duplicates = tree.insert(stored, fresh, first_page=first).duplicates
    assert duplicates.size == 0
    path, node = [], tree.match(tokens).node
    while node.parent is not None:
        path.append(node.pages(Tier.HBM, page_size))
        node = node.parent
    assert np.concatenate(path[::-1]).tolist() == mine
    assert tree.match(tokens).tokens == ours * page_size
    check_integrity(tree)


@pytest.mark.parametrize("times", [1, 2, 10])
@pytest.mark.parametrize("label", Label)
def test_a_match_repeated_while_its_request_waits_counts_once(times: int, label: Label) -> None:
    tree = RadixTree(1)
    node = tree.insert([1, 2, 3], [0, 1, 2]).node
    tree.begin("r", "p", tree.match([1, 2, 3]), label=label)
    for _ in range(times):
        tree.rematch("r", tree.match([1, 2, 3]))
        assert num_holders(node) == 1
        assert label_of(node) is label
    tree.end("r", well=False)
    assert num_holders(node) == 0
    check_integrity(tree)


def test_a_match_repeated_after_pages_left_or_came_counts_what_is_there_now() -> None:
    tree = RadixTree(1)
    tree.insert([1, 2], [0, 1])
    tree.begin("r", "p", tree.match([1, 2, 3, 4]))
    assert tree.evict(Tier.HBM, 1) is not None
    tree.rematch("r", tree.match([1, 2, 3, 4]))
    tree.insert([1, 2, 3], [0, 3, 4], first_page=0)
    tree.rematch("r", tree.match([1, 2, 3, 4]))
    assert [num_holders(node) for node in tree.nodes()] == [1] * tree.num_nodes
    tree.end("r", well=False)
    assert not any(num_holders(node) for node in tree.nodes())
    assert tree.pages[Tier.HBM].evictable == 3
    check_integrity(tree)
