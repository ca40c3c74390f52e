"""Sub-agents: programs with a parent."""

from __future__ import annotations

import pytest

from kvtier.errors import TreeError
from kvtier.ids import Label
from kvtier.tree.holders import label_of
from kvtier.tree.integrity import check_integrity
from kvtier.tree.node import Node, Tier
from kvtier.tree.tree import RadixTree


def turn(tree: RadixTree, program: str, tokens: list[int]) -> Node:
    """One request that ends well."""
    match = tree.match(tokens)
    tree.begin(program, program, match)
    pages = [100 * tokens[-1] + at for at in range(len(tokens) - match.tokens)]
    node = tree.insert(tokens, pages, first_page=match.tokens).node
    tree.publish(program, node)
    tree.end(program, well=True)
    return node


def family() -> tuple[RadixTree, dict[str, Node]]:
    """A parent with a child and a grandchild on a shared head, and a stranger."""
    tree = RadixTree(1)
    prompts = {"parent": [1, 2], "child": [1, 3], "grandchild": [1, 4], "stranger": [1, 5]}
    nodes = {name: turn(tree, name, tokens) for name, tokens in prompts.items()}
    tree.adopt("child", "parent")
    tree.adopt("grandchild", "child")
    return tree, nodes


def test_children_are_released_with_their_parent() -> None:
    tree, nodes = family()
    tree.release("parent")
    labels = {name: label_of(node) for name, node in nodes.items()}
    assert labels == {
        "parent": Label.INACTIVE,
        "child": Label.INACTIVE,
        "grandchild": Label.INACTIVE,
        "stranger": Label.BUSY,
    }
    evicted = tree.evict(Tier.HBM, 3)
    assert evicted is not None
    assert sorted(evicted.ids(Tier.HBM)) == [201, 300, 400]
    check_integrity(tree)


def test_a_child_that_is_released_leaves_its_parent_alone() -> None:
    tree, nodes = family()
    tree.release("child")
    assert label_of(nodes["parent"]) is Label.BUSY
    turn(tree, "child", [1, 3])
    tree.release("parent")
    assert label_of(tree.match([1, 3]).node) is Label.BUSY
    check_integrity(tree)


def test_a_child_has_a_label_of_its_own() -> None:
    tree, nodes = family()
    tree.relabel("parent", Label.IDLE)
    assert label_of(nodes["parent"]) is Label.IDLE
    assert label_of(nodes["child"]) is Label.BUSY
    assert label_of(tree.match([1]).node) is Label.BUSY


def test_a_running_child_runs_on_when_its_parent_is_released() -> None:
    tree, _ = family()
    tree.begin("running", "child", tree.match([1, 3]))
    tree.release("parent")
    assert label_of(tree.match([1, 3]).node) is Label.INACTIVE
    tree.end("running", well=True)
    check_integrity(tree)


@pytest.mark.parametrize(
    ("child", "parent"), [("parent", "grandchild"), ("parent", "parent"), ("child", "stranger")]
)
def test_a_family_is_a_tree(child: str, parent: str) -> None:
    tree, _ = family()
    with pytest.raises(TreeError):
        tree.adopt(child, parent)
    tree.adopt("child", "parent")
    check_integrity(tree)
