"""Invariants of draft trees."""

from __future__ import annotations

import torch

from jetspec.tree import DraftTree, pack_bits


def validate(tree: DraftTree) -> None:
    """Assert every invariant of a tree."""
    num_nodes = tree.token_BN.shape[1]
    node_N = torch.arange(num_nodes, device=tree.token_BN.device)
    real_BN = node_N < tree.size_B[:, None]
    child_BN = real_BN & (node_N > 0)
    parent_BN = tree.parent_BN

    assert ((tree.size_B >= 1) & (tree.size_B <= num_nodes)).all(), "size out of range"
    assert torch.where(child_BN, (parent_BN >= 0) & (parent_BN < node_N), parent_BN == node_N).all(), (
        "a parent must come before its child; root and padding are their own"
    )
    above_BN = tree.depth_BN.gather(1, parent_BN)
    assert (tree.depth_BN == torch.where(child_BN, above_BN + 1, 0)).all(), "depth is not the parent's plus one"
    assert (tree.depth_BN <= tree.max_depth).all(), "deeper than max_depth"

    own_NW = pack_bits(torch.eye(num_nodes, dtype=torch.bool, device=tree.token_BN.device))
    inherited_BNW = torch.where(
        child_BN[..., None], tree.ancestor_BNW.gather(1, parent_BN[..., None].expand_as(tree.ancestor_BNW)), 0
    )
    assert tree.ancestor_BNW.dtype == torch.int32
    assert (tree.ancestor_BNW == inherited_BNW | own_NW).all(), "mask is not the parent's row plus the own bit"

    same_BNN = (parent_BN[:, :, None] == parent_BN[:, None]) & (tree.token_BN[:, :, None] == tree.token_BN[:, None])
    both_BNN = child_BN[:, :, None] & child_BN[:, None] & (node_N[:, None] < node_N)
    assert not (same_BNN & both_BNN).any(), "siblings carry the same token"
    if tree.score_BN is not None:
        rises_BN = tree.score_BN > tree.score_BN.gather(1, parent_BN)
        assert not (rises_BN & child_BN).any(), "a child outranks its parent"
