"""Depths, ancestors and bitmasks of trees agree with their parent pointers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.tree import DraftTree, pack_bits, unpack_bits
from tests.trees import validate

fast = settings(max_examples=40)


def random_tree(seed: int, batch: int, num_nodes: int) -> DraftTree:
    """Return trees of random parents and sizes; tokens are node indices, so siblings differ."""
    rng = torch.Generator().manual_seed(seed)
    below_N = torch.arange(num_nodes).clamp(min=1)
    parent_BN = (torch.rand(batch, num_nodes, generator=rng) * below_N).long()
    size_B = torch.randint(1, num_nodes + 1, (batch,), generator=rng)
    return DraftTree.from_parents(torch.arange(num_nodes).expand(batch, -1), parent_BN, size_B, max(num_nodes - 1, 0))


def climb(parent_N: list[int], node: int) -> set[int]:
    """Return a node and its ancestors."""
    return {node} if parent_N[node] == node else {node} | climb(parent_N, parent_N[node])


@fast
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 70))
def test_ancestors_and_depths_equal_those_found_by_climbing(seed: int, batch: int, num_nodes: int) -> None:
    tree = random_tree(seed, batch, num_nodes)
    validate(tree)
    for row in range(batch):
        parents = tree.parent_BN[row].tolist()
        above = [climb(parents, node) for node in range(num_nodes)]
        assert tree.depth_BN[row].tolist() == [len(nodes) - 1 for nodes in above]
        assert [set(line.nonzero().flatten().tolist()) for line in tree.visible_BNN()[row]] == above


@fast
@given(st.integers(0, 10**6), st.integers(1, 70))
def test_padding_attends_only_to_itself_and_no_node_to_padding(seed: int, num_nodes: int) -> None:
    tree = random_tree(seed, 1, num_nodes)
    size = int(tree.size_B)
    visible_NN = tree.visible_BNN()[0]
    assert torch.equal(visible_NN[size:], torch.eye(num_nodes, dtype=torch.bool)[size:])
    assert not visible_NN[:size, size:].any()
    assert tree.parent_BN[0, size:].tolist() == list(range(size, num_nodes))


@fast
@given(st.integers(0, 10**6), st.integers(1, 100))
def test_bits_survive_packing(seed: int, num_bits: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    visible_NN = torch.rand(5, num_bits, generator=rng) < 0.5
    visible_NN[0] = True
    word_NW = pack_bits(visible_NN)
    assert word_NW.dtype == torch.int32 and word_NW.shape == (5, -(-num_bits // 32))
    assert torch.equal(unpack_bits(word_NW, num_bits), visible_NN)
    for words, bits in zip(word_NW.tolist(), visible_NN.tolist(), strict=True):
        unsigned = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words))
        assert unsigned == sum(1 << j for j, bit in enumerate(bits) if bit)


@pytest.mark.parametrize("num_nodes", [1, 5, 33, 64])
def test_chain_mask_is_causal(num_nodes: int) -> None:
    tree = DraftTree.chain(torch.arange(2 * num_nodes).view(2, num_nodes))
    validate(tree)
    assert tree.max_depth == num_nodes - 1
    assert torch.equal(tree.visible_BNN()[1], torch.ones(num_nodes, num_nodes).tril().bool())


def small_tree() -> DraftTree:
    """0 -> 1, 2; 1 -> 3; then one row of padding."""
    token_BN, parent_BN = torch.tensor([[5, 6, 7, 6, 9]]), torch.tensor([[0, 0, 0, 1, 3]])
    score_BN = torch.tensor([[0.0, -0.5, -1.5, -0.75, 0.0]])
    return DraftTree.from_parents(token_BN, parent_BN, torch.tensor([4]), 2, score_BN)


def changed(x_BN: Tensor, node: int, value: float) -> Tensor:
    x_BN = x_BN.clone()
    x_BN[0, node] = value
    return x_BN


@pytest.mark.parametrize(
    ("field", "node", "value"),
    [
        ("token_BN", 2, 6),  # token of a sibling
        ("parent_BN", 1, 2),  # parent after child
        ("parent_BN", 3, 2),  # mask and parent disagree
        ("parent_BN", 4, 0),  # padding with a parent
        ("depth_BN", 3, 1),
        ("score_BN", 3, -0.25),  # above its parent
        ("ancestor_BNW", 3, 0b1001),  # without its parent
        ("ancestor_BNW", 4, 0b10001),  # padding attends to the root
    ],
)
def test_validate_finds_broken_invariants(field: str, node: int, value: float) -> None:
    tree = small_tree()
    validate(tree)
    broken: dict[str, Any] = {field: changed(getattr(tree, field), node, value)}
    with pytest.raises(AssertionError):
        validate(replace(tree, **broken))


def test_validate_checks_the_bounds() -> None:
    with pytest.raises(AssertionError):
        validate(replace(small_tree(), max_depth=1))
    with pytest.raises(AssertionError):
        validate(replace(small_tree(), size_B=torch.tensor([6])))


@fast
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 40), st.integers(0, 12), st.integers(0, 4))
def test_limits_keep_the_first_nodes_within_them(
    seed: int, batch: int, num_nodes: int, budget: int, width: int
) -> None:
    """A node stays within the budget if its parent stays and fewer than `width` siblings precede it."""
    tree = random_tree(seed, batch, num_nodes)
    small = tree.limited(torch.full((batch,), budget), torch.full((batch,), width))
    validate(small)
    for row in range(batch):
        parents, kept = tree.parent_BN[row].tolist(), [0]
        num_children = [0] * num_nodes
        for node in range(1, int(tree.size_B[row])):
            num_children[parents[node]] += 1
            allowed = num_children[parents[node]] <= max(width, 1) and parents[node] in kept
            if allowed and len(kept) < max(budget, 1):
                kept.append(node)
        size = int(small.size_B[row])
        assert small.token_BN[row, :size].tolist() == kept
        assert [kept[p] for p in small.parent_BN[row, :size].tolist()] == [parents[node] for node in kept]
