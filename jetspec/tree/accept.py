"""Acceptance: the path of a draft tree that agrees with the target.

Every committed token is the target's own choice after its own prefix, greedy or sampled. The tree only decides how many
of these choices one forward serves, so the output follows the target exactly, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.ops.select import uses_kernel
from jetspec.tree.draft_tree import DraftTree
from jetspec.tree.sample import choose_nodes, choose_token
from jetspec.types import RowSampling


@dataclass(frozen=True)
class Acceptance:
    """Outcome of a round: the accepted path and the target's token after it."""

    path_BD1: Tensor
    """Node indices, anchor first, padded with the last accepted node. D is the tree's `max_depth`."""
    length_B: Tensor
    """Accepted draft tokens, 0 to D."""
    bonus_B: Tensor
    """The target's own next token: the next anchor."""
    token_BD1: Tensor
    """Committed tokens: the draft tokens of the path, then the bonus, repeated to the end of the row."""

    @classmethod
    def of(cls, tree: DraftTree, path_BD1: Tensor, length_B: Tensor, bonus_B: Tensor) -> Acceptance:
        draft_BD, bonus_B1 = tree.token_BN.gather(1, path_BD1[:, 1:]), bonus_B[:, None]
        step_D1 = torch.arange(path_BD1.shape[1], device=bonus_B.device)
        token_BD1 = torch.where(step_D1 < length_B[:, None], torch.cat((draft_BD, bonus_B1), dim=1), bonus_B1)
        return cls(path_BD1, length_B, bonus_B, token_BD1)


def accept(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """Walk from the anchor to the child that carries the target's choice, until no child does.

    The anchor is at position `cached_len_B`, so the choice after a node of depth d is for `cached_len_B + d + 1`.
    """
    if uses_kernel(logits_BNV):
        # A greedy choice does not depend on the position.
        position_BN = cached_len_B[:, None] + tree.depth_BN + 1 if sampling.any_sampled else tree.depth_BN
        return walk(tree, choose_nodes(logits_BNV, sampling, position_BN))
    row_B = torch.arange(len(cached_len_B), device=cached_len_B.device)

    def choose(node_B: Tensor, depth: int) -> Tensor:
        return choose_token(logits_BNV[row_B, node_B], sampling, cached_len_B + depth + 1)

    return _walk(tree, choose)


def walk(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    """`accept` for choices of the target that are given, one per node."""
    if uses_kernel(choice_BN):
        from jetspec.tree.accept_triton import accept_triton

        return Acceptance(*accept_triton(tree, choice_BN))
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
