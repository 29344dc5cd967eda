"""Penalties, biases and grammar masks on the target's logits at every node of a tree.

A node gets the logits that plain decoding would have at its position, to the last bit, so that the text does not depend
on the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.tree.draft_tree import DraftTree, unpack_bits
from jetspec.types import RowPenalties


def penalize(tree: DraftTree, logits_BNV: Tensor, penalties: RowPenalties) -> Tensor:
    """Add biases and subtract penalties, for the counts of the committed text and of the node's path. float32; no host
    sync.

    All nodes share the counts of the committed text, the anchor included. Only tokens of the tree can occur more often,
    so their few entries are overwritten, with the count on the node's path added.
    """
    adjusted_BNV = logits_BNV.float() + _shift(penalties, penalties.count_BV, penalties.bias_BV)[:, None]
    path_BNN = tree.visible_BNN() & (tree.depth_BN > 0)[:, None]
    same_BNN = tree.token_BN[:, :, None] == tree.token_BN[:, None]
    written_BNN = path_BNN.float() @ same_BNN.float()  # entry (i, j): occurrences of token j on the path to i
    count_BNN = penalties.count_BV.gather(1, tree.token_BN)[:, None] + written_BNN
    bias_B1N = penalties.bias_BV.gather(1, tree.token_BN)[:, None]
    token_BNN = tree.token_BN[:, None].expand_as(count_BNN)
    entry_BNN = logits_BNV.gather(2, token_BNN).float() + _shift(penalties, count_BNN, bias_B1N)
    return adjusted_BNV.scatter_(2, token_BNN, entry_BNN)  # repeated tokens get the same value twice


def _shift(penalties: RowPenalties, count: Tensor, bias: Tensor) -> Tensor:
    """Return the amount added to a logit. One expression for all entries: equal counts give equal bits."""
    row = (-1, *[1] * (count.dim() - 1))
    frequency, presence = penalties.frequency_B.view(row), penalties.presence_B.view(row)
    return bias - (frequency * count.float() + presence * (count > 0))


def forbid(logits_BNV: Tensor, row_R: Tensor, allowed_RNW: Tensor) -> Tensor:
    """Set the logits of forbidden tokens to -inf in some rows; bit t of a node's mask allows token t."""
    forbidden_RNV = ~unpack_bits(allowed_RNW, logits_BNV.shape[-1])
    return logits_BNV.index_copy(0, row_R, logits_BNV[row_R].masked_fill(forbidden_RNV, -torch.inf))
