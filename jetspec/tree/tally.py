"""Evidence of verified trees about the weights of the choice model.

Given that the target chose one of the children that a node has in the tree, the probability of each of them depends
only on the differences of their log-odds, so on the weights of logits and noise. The sums here are the first and second
derivatives of the log-likelihood of these choices, for a Newton step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.ops.noise import gumbel_at
from jetspec.ops.select import operation
from jetspec.tree.draft_tree import Acceptance, DraftTree

SUMS = 6
"""Number of choices; gradient by the scale of the logits and by the weight of the noise; curvature by the scale, mixed,
and by the noise."""


class Drawn(NamedTuple):
    """Noise of the choices below the anchors, and the weights that the draft used."""

    entry_B: Tensor
    """Row of the tally per request; 0 is not tallied."""
    seed_B: Tensor
    cached_len_B: Tensor
    """Positions of the anchors."""
    weight_SD: Tensor
    """Weights of the noise by entry and depth."""


@operation(lambda tally_SDX, *_: (tally_SDX,))
def tally_choices(tally_SDX: Tensor, drawn: Drawn, tree: DraftTree, verdict: Acceptance) -> None:
    """Add the sums of a round to the entries of its requests.

    `tree` is scored by log-probability. It may hold other nodes than the tree that was verified: those committed tokens
    count that lie on a path of it.
    """
    assert tree.score_BN is not None
    entry_B, row_B = drawn.entry_B, torch.arange(len(drawn.entry_B), device=drawn.entry_B.device)
    position_BN = drawn.cached_len_B[:, None] + tree.depth_BN
    noise_BN = gumbel_at(drawn.seed_B[:, None].expand_as(position_BN), position_BN, tree.token_BN)
    parent_B1 = torch.zeros_like(entry_B[:, None])
    tallied_B = entry_B > 0
    for step in range(min(tally_SDX.shape[1], verdict.token_BD1.shape[1])):
        is_child_BN = (tree.parent_BN == parent_B1) & (tree.depth_BN == step + 1)
        is_taken_BN = is_child_BN & (tree.token_BN == verdict.token_BD1[:, step, None])
        tallied_B = tallied_B & (verdict.length_B >= step) & is_taken_BN.any(1)
        odds_BN = (tree.score_BN - tree.score_BN.gather(1, parent_B1)).masked_fill(~is_child_BN, -torch.inf)
        prob_B1N = torch.where(tallied_B[:, None], odds_BN, 0.0).softmax(1)[:, None]
        logit_BN = odds_BN - drawn.weight_SD[entry_B, step, None] * noise_BN
        x_B2N = torch.stack((logit_BN, noise_BN), 1).masked_fill(~is_child_BN[:, None], 0.0)
        mean_B21 = (prob_B1N * x_B2N).sum(2, keepdim=True)
        parent_B1 = is_taken_BN.int().argmax(1, keepdim=True)
        gradient_B2 = x_B2N[row_B, :, parent_B1[:, 0]] - mean_B21[..., 0]
        spread_B2N = x_B2N - mean_B21
        covariance_B22 = (prob_B1N * spread_B2N) @ spread_B2N.mT
        curvature_B3 = covariance_B22.flatten(1)[:, [0, 1, 3]]
        sums_BX = torch.cat((torch.ones_like(gradient_B2[:, :1]), gradient_B2, curvature_B3), 1)
        sums_BX = torch.where(tallied_B[:, None], sums_BX, 0.0)
        tally_SDX[:, step].index_add_(0, entry_B, sums_BX)
