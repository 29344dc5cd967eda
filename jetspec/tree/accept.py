"""Acceptance: the target's choice at every node, and the path of a draft tree that agrees with it.

Every committed token is the target's own choice after its own prefix, greedy or sampled. The tree only decides how many
of these choices one forward serves, so the output follows the target exactly, whatever was drafted.

Penalties, biases and grammar masks give a node the logits that plain decoding would have at its position, to the last
bit. Sampling at a node is an argmax, or a draw that depends only on (seed, position, token): adding Gumbel noise to
log-probabilities and taking the argmax samples from them. The noise comes from a counter-based generator, so the token
of a request at a position does not depend on the tree, batch or device that verifies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetspec.ops.noise import gumbel
from jetspec.ops.select import operation
from jetspec.tree.draft_tree import Acceptance, DraftTree, unpack_bits
from jetspec.types import RowPenalties, RowSampling


@operation(lambda _, logits_BNV, *__: (logits_BNV,))
def accept(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """Walk from the anchor to the child that carries the target's choice, until no child does.

    The anchor is at position `cached_len_B`, so the choice after a node of depth d is for `cached_len_B + d + 1`.
    """
    row_B = torch.arange(len(cached_len_B), device=cached_len_B.device)

    # Tokens are chosen along the path alone.
    def choose(node_B: Tensor, depth: int) -> Tensor:
        return choose_token(logits_BNV[row_B, node_B], sampling, cached_len_B + depth + 1)

    return _walk(tree, choose)


def accept_by_nodes(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """`accept` that chooses a token after every node at once, for a GPU."""
    # A greedy choice does not depend on positions, so none are computed for it.
    position_BN = cached_len_B[:, None] + tree.depth_BN + 1 if sampling.any_sampled else tree.depth_BN
    return walk(tree, choose_nodes(logits_BNV, sampling, position_BN))


@operation(lambda _, choice_BN: (choice_BN,))
def walk(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    """`accept` for choices of the target that are given, one per node."""
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


# -- choices


def choose_token(logits_BV: Tensor, sampling: RowSampling, position_B: Tensor) -> Tensor:
    """Return the target's token at each row's position: argmax for greedy rows, a draw for the others. int64 (B,)."""
    greedy_B = logits_BV.argmax(-1)
    if not sampling.any_sampled:
        return greedy_B
    noise_BV = gumbel(sampling.seed_B, position_B, logits_BV.shape[-1])
    sampled_B = (filter_logits(logits_BV, sampling) + noise_BV).argmax(-1)
    return torch.where(sampling.temperature_B > 0, sampled_B, greedy_B)


@operation(lambda logits_BNV, *_: (logits_BNV,))
def choose_nodes(logits_BNV: Tensor, sampling: RowSampling, position_BN: Tensor) -> Tensor:
    """`choose_token` for several nodes per request, which share its sampling parameters. int64 (B, N)."""
    sampling = _of_nodes(sampling, logits_BNV.shape[1])
    return choose_token(logits_BNV.flatten(0, 1), sampling, position_BN.flatten()).view(logits_BNV.shape[:2])


def _of_nodes(sampling: RowSampling, num_nodes: int) -> RowSampling:
    """Return the parameters of every node of the requests."""
    columns: dict[str, Any] = {
        k: v.repeat_interleave(num_nodes) for k, v in vars(sampling).items() if torch.is_tensor(v)
    }
    return replace(sampling, **columns)


def filter_logits(logits_BV: Tensor, sampling: RowSampling) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p in turn; dropped tokens become -inf. float32.

    Each filter keeps the tokens above some value, so one sort finds the lowest value that all three keep. Tokens that
    tie with it stay. Greedy rows count as temperature 1.
    """
    # Below 1e-6 a draw is the argmax anyway, and the quotient could overflow.
    temperature_B = torch.where(sampling.temperature_B > 0, sampling.temperature_B.clamp(min=1e-6), 1.0)
    logits_BV = logits_BV.float() / temperature_B[:, None]
    if not sampling.any_filtered:
        return logits_BV
    return logits_BV.masked_fill(logits_BV < _least_kept(logits_BV, sampling)[:, None], -torch.inf)


@operation(lambda logits_BNV, _: (logits_BNV,))
def least_kept(logits_BNV: Tensor, sampling: RowSampling) -> Tensor:
    """Return the least value, after temperature, that the filters keep, (B, N) float32. -inf for greedy rows."""
    sampling = _of_nodes(sampling, logits_BNV.shape[1])
    is_sampled_T = sampling.temperature_B > 0
    temperature_T = torch.where(is_sampled_T, sampling.temperature_B.clamp(min=1e-6), 1.0)
    least_T = _least_kept(logits_BNV.flatten(0, 1).float() / temperature_T[:, None], sampling)
    return torch.where(is_sampled_T, least_T, -torch.inf).unflatten(0, logits_BNV.shape[:2])


def _least_kept(logits_BV: Tensor, sampling: RowSampling) -> Tensor:
    vocab = logits_BV.shape[-1]
    sorted_BV = logits_BV.sort(descending=True).values
    top_k_B = torch.where(sampling.top_k_B > 0, sampling.top_k_B, vocab).clamp(max=vocab)
    kth_B1 = sorted_BV.gather(1, top_k_B[:, None] - 1)

    prob_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, -torch.inf).softmax(-1)
    tail_BV = prob_BV.flip(-1).cumsum(-1).flip(-1)  # mass of a token and all below it; 0 where top-k dropped it
    num_kept_B = (tail_BV > 1 - sampling.top_p_B[:, None]).sum(-1).clamp(min=1)
    last_B1 = sorted_BV.gather(1, num_kept_B[:, None] - 1)

    min_p_B1 = sorted_BV[:, :1] + sampling.min_p_B[:, None].log()
    return torch.maximum(last_B1, min_p_B1)[:, 0]


# -- penalties and masks


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
