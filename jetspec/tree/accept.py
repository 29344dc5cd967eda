"""Acceptance: the path of a draft tree that agrees with the target.

Every committed token is the target's own choice after its own prefix, greedy or sampled. The tree only decides how many
of these choices one forward serves, so the output follows the target exactly, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jetspec.ops.select import select
from jetspec.tree.draft_tree import Acceptance, DraftTree
from jetspec.tree.sample import choose_nodes, choose_token
from jetspec.types import RowSampling


def accept(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """Walk from the anchor to the child that carries the target's choice, until no child does.

    The anchor is at position `cached_len_B`, so the choice after a node of depth d is for `cached_len_B + d + 1`.
    """
    return select("accept", accept_by_depth, logits_BNV)(tree, logits_BNV, sampling, cached_len_B)


def accept_by_nodes(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """`accept` that chooses a token after every node at once, for a GPU."""
    # A greedy choice does not depend on positions, so none are computed for it.
    position_BN = cached_len_B[:, None] + tree.depth_BN + 1 if sampling.any_sampled else tree.depth_BN
    return walk(tree, choose_nodes(logits_BNV, sampling, position_BN))


def accept_by_depth(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """`accept` that chooses tokens along the path alone, for a CPU."""
    row_B = torch.arange(len(cached_len_B), device=cached_len_B.device)

    def choose(node_B: Tensor, depth: int) -> Tensor:
        return choose_token(logits_BNV[row_B, node_B], sampling, cached_len_B + depth + 1)

    return _walk(tree, choose)


def walk(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    """`accept` for choices of the target that are given, one per node."""
    return select("walk", walk_reference, choice_BN)(tree, choice_BN)


def walk_reference(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    return _walk(tree, lambda node_B, depth: choice_BN.gather(1, node_B[:, None])[:, 0])


def _walk(tree: DraftTree, choose: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """The walk in torch. `choose(node_B, depth)` returns the target's choices at one node per request."""
    node_B = length_B = bonus_B = torch.zeros_like(tree.size_B)
    walking_B = torch.ones_like(node_B, dtype=torch.bool)
    path = []
    for depth in range(tree.max_depth + 1):
        path.append(node_B)
        choice_B = choose(node_B, depth)
        bonus_B = torch.where(walking_B, choice_B, bonus_B)
        # Padding has depth 0, so it never counts as a child.
        child_BN = (tree.parent_BN == node_B[:, None]) & (tree.token_BN == choice_B[:, None])
        child_BN &= tree.depth_BN == depth + 1
        walking_B = walking_B & child_BN.any(1)
        node_B = torch.where(walking_B, child_BN.int().argmax(1), node_B)
        length_B = length_B + walking_B
        # Stopping early reads a tensor: free on a CPU, a host sync on a GPU.
        if node_B.device.type == "cpu" and not walking_B.any():
            break
    path += [node_B] * (tree.max_depth + 1 - len(path))
    return Acceptance.of(tree, torch.stack(path, dim=1), length_B, bonus_B)
