"""What a request asks to be changed in the target's logits, at every node of its tree, before the target's choice.

Both functions give a node the logits that plain decoding would have at its place, to the last bit, so that the text is
the same whatever the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.tree.draft_tree import DraftTree, unpack_bits
from jetspec.types import RowPenalties


def penalize(tree: DraftTree, logits_BNV: Tensor, penalties: RowPenalties) -> Tensor:
    """Add biases and take off penalties, counting the committed text and the node's own path. float32; no host sync.

    Every node starts from the counts of the committed text, the anchor included. Only tokens of the tree can have
    other counts, so these few entries are written again, with the count on the node's path.
    """
    adjusted_BNV = logits_BNV.float() + _shift(penalties, penalties.count_BV, penalties.bias_BV)[:, None]
    path_BNN = tree.visible_BNN() & (tree.depth_BN > 0)[:, None]
    same_BNN = tree.token_BN[:, :, None] == tree.token_BN[:, None]
    written_BNN = path_BNN.float() @ same_BNN.float()  # entry (i, j): how often token j occurs on the path to i
    count_BNN = penalties.count_BV.gather(1, tree.token_BN)[:, None] + written_BNN
    bias_B1N = penalties.bias_BV.gather(1, tree.token_BN)[:, None]
    token_BNN = tree.token_BN[:, None].expand_as(count_BNN)
    entry_BNN = logits_BNV.gather(2, token_BNN).float() + _shift(penalties, count_BNN, bias_B1N)
    return adjusted_BNV.scatter_(2, token_BNN, entry_BNN)  # a token that occurs twice is given one value twice


def _shift(penalties: RowPenalties, count: Tensor, bias: Tensor) -> Tensor:
    """What to add to a logit. The same operations for every entry, so that equal counts give equal bits."""
    row = (-1, *[1] * (count.dim() - 1))
    frequency, presence = penalties.frequency_B.view(row), penalties.presence_B.view(row)
    return bias - (frequency * count.float() + presence * (count > 0))


def forbid(logits_BNV: Tensor, row_R: Tensor, allowed_RNW: Tensor) -> Tensor:
    """-inf for what is not allowed in some rows; bit t of a node's mask is token t."""
    forbidden_RNV = ~unpack_bits(allowed_RNW, logits_BNV.shape[-1])
    return logits_BNV.index_copy(0, row_R, logits_BNV[row_R].masked_fill(forbidden_RNV, -torch.inf))
