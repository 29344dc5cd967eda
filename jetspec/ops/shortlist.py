"""The tokens of each depth that an edge term will rank: those that some likely parent would choose.

What a head says of a depth alone is no guide to them. A token that few parents have for a child, but those surely, is
among the least likely of its depth; and the edge term is trained together with the head, so that neither is a
distribution without the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.select import select
from jetspec.ops.topk_logprob import apply_temperature, topk_logprob
from jetspec.types import EdgeFactors


def shortlist(
    logits_BDV: Tensor,
    root_B: Tensor,
    edge: EdgeFactors,
    count: int,
    num_parents: int,
    temperature_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`count` tokens of every depth, in no particular order, and their log-probabilities without an edge, in fp32.

    Chosen are those c for which log q(c|y) is greatest, for the best of some parents y: the `num_parents` most likely
    tokens of the depth before, at the first depth the root; and no parent at all. The logits are to be divided by
    `temperature_B`; the gates of the edge already are.
    """
    parents_BDP = topk_logprob(logits_BDV, num_parents)[0]
    rank, size = edge.gate_BDR.shape[-1], edge.successor_VR.itemsize
    kernel = select("shortlist", shortlist_reference, logits_BDV, count=count, rank=rank, rank_bytes=size)
    return kernel(logits_BDV, root_B, parents_BDP, edge, count, temperature_B)


def shortlist_reference(
    logits_BDV: Tensor,
    root_B: Tensor,
    parents_BDP: Tensor,
    edge: EdgeFactors,
    count: int,
    temperature_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    alone_BDV = apply_temperature(logits_BDV, temperature_B).float().log_softmax(-1)
    token_BDC = worth_reference(alone_BDV, root_B, parents_BDP, edge).topk(count)[1]
    return token_BDC, alone_BDV.gather(-1, token_BDC)


def worth_reference(alone_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors) -> Tensor:
    """How likely each token is, at best. All parents of a request are taken in one product, which reads the factors
    once; requests come one by one, as a row for every parent and token is large."""
    first_B1P = root_B[:, None, None].expand(-1, 1, parents_BDP.shape[-1])
    parent_BDP = torch.cat((first_B1P, parents_BDP[:, :-1]), 1)
    worth = []
    for row, alone_DV in enumerate(alone_BDV):
        given_DPV = edge.term(row, parent_BDP[row]).add_(alone_DV[:, None])
        given_DPV -= given_DPV.logsumexp(-1, keepdim=True)
        worth.append(torch.maximum(alone_DV, given_DPV.amax(1)))
    return torch.stack(worth)
