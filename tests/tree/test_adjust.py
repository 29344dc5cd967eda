"""Every node gets the logits of plain decoding at its position, bit for bit."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.tree import DraftTree, forbid, pack_bits, penalize
from jetspec.types import RowPenalties

VOCAB = 5


def random_tree(rng: torch.Generator, num_rows: int, num_nodes: int) -> DraftTree:
    token = torch.randint(VOCAB, (num_rows, num_nodes), generator=rng)
    parent = torch.stack([torch.randint(max(1, i), (num_rows,), generator=rng) for i in range(num_nodes)], 1)
    size = torch.randint(1, num_nodes + 1, (num_rows,), generator=rng)
    return DraftTree.from_parents(token, parent, size, num_nodes - 1)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 12))
def test_node_counts_its_own_path(seed: int, num_nodes: int) -> None:
    """Tokens repeat often, in the committed text and along paths. The oracle is a tree of one node."""
    rng = torch.Generator().manual_seed(seed)
    tree = random_tree(rng, 2, num_nodes)
    logits_BNV = torch.randn(2, num_nodes, VOCAB, generator=rng)
    penalties = RowPenalties(
        presence_B=torch.rand(2, generator=rng) * 4 - 2,
        frequency_B=torch.rand(2, generator=rng) * 4 - 2,
        count_BV=torch.randint(3, (2, VOCAB), generator=rng, dtype=torch.int32),
        bias_BV=torch.randn(2, VOCAB, generator=rng),
    )
    adjusted_BNV = penalize(tree, logits_BNV, penalties)
    for row in range(2):
        for node in range(int(tree.size_B[row])):
            path, at = Counter[int](), node
            while at:
                path[int(tree.token_BN[row, at])] += 1
                at = int(tree.parent_BN[row, at])
            count_V = penalties.count_BV[row] + torch.tensor([path[t] for t in range(VOCAB)], dtype=torch.int32)
            alone = RowPenalties(
                penalties.presence_B[row : row + 1],
                penalties.frequency_B[row : row + 1],
                count_V[None],
                penalties.bias_BV[row : row + 1],
            )
            root = DraftTree.root(tree.token_BN[row : row + 1, node])
            expected_11V = penalize(root, logits_BNV[row : row + 1, node : node + 1], alone)
            assert torch.equal(adjusted_BNV[row, node], expected_11V[0, 0])


def test_penalty_follows_the_formula_of_openai() -> None:
    penalties = RowPenalties(
        torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([[0, 1, 3]]), torch.tensor([[0.0, 0.0, 2.0]])
    )
    adjusted_11V = penalize(DraftTree.root(torch.tensor([0])), torch.zeros(1, 1, 3), penalties)
    assert adjusted_11V.tolist() == [[[0.0, -0.75, 2 - 0.5 - 0.75]]]


def test_forbidden_tokens_are_masked_in_their_row_only() -> None:
    logits_BNV = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0))
    allowed_RNV = torch.rand(1, 2, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    found_BNV = forbid(logits_BNV, torch.tensor([1]), pack_bits(allowed_RNV))
    assert torch.equal(found_BNV[[0, 2]], logits_BNV[[0, 2]])
    assert torch.equal(found_BNV[1], logits_BNV[1].where(allowed_RNV[0], -torch.inf))
    assert logits_BNV.isfinite().all()
