"""Top-k tokens of a distribution with their exact log-probabilities, and shortlists: the tokens of each depth that an
edge term ranks, chosen as children of probable parents.

The logits of a depth alone are not enough to choose them: the edge term is trained together with the head, so a child
that is nearly certain after one parent may be improbable at its depth when the parent is unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.noise import gumbel
from jetspec.ops.select import operation, select
from jetspec.types import ChoiceModel, EdgeFactors


@operation(lambda logits, *_: (logits,), lambda _, k, *__: {"num_tokens": k})
def topk_logprob(logits: Tensor, k: int, choice: ChoiceModel | None = None) -> tuple[Tensor, Tensor]:
    """Return the k best tokens of (..., V) logits, best first, and their log-probabilities over all of V, in fp32.

    With a choice model, the logits are (B, D, V), and the log-odds of the choices take their place. Equal values may
    come in any order; the kernel puts the lower token first.
    """
    wide = log_odds(logits, choice).float()
    value, token = wide.topk(k, dim=-1)
    return token, value - torch.logsumexp(wide, dim=-1, keepdim=True)


def log_odds(logits_BDV: Tensor, choice: ChoiceModel | None) -> Tensor:
    """Return the log-odds of the target's choices, in fp32. Without a model return the input."""
    if choice is None:
        return logits_BDV
    scaled_BDV = apply_temperature(logits_BDV, choice)
    if choice.weight_BD is None:
        return scaled_BDV
    assert choice.seed_B is not None and choice.position_BD is not None
    B, D, V = logits_BDV.shape
    seed_T, position_T = (x.expand(B, D).flatten() for x in (choice.seed_B[:, None], choice.position_BD))
    odds_BDV = scaled_BDV + choice.weight_BD[..., None] * gumbel(seed_T, position_T, V).view(B, D, V)
    if choice.least_BD is None or choice.bonus_BD is None:
        return odds_BDV
    return odds_BDV + choice.bonus_BD[..., None] * (scaled_BDV >= choice.least_BD[..., None])


def apply_temperature(x_BDX: Tensor, choice: ChoiceModel | None) -> Tensor:
    """Divide by the temperatures of a choice model, in fp32. Without a model return the input."""
    return x_BDX if choice is None else x_BDX / choice.temperature_BD[..., None]


def shortlist(
    logits_BDV: Tensor,
    root_B: Tensor,
    edge: EdgeFactors,
    count: int,
    num_parents: int,
    choice: ChoiceModel | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `count` tokens of every depth, in any order, and their log-probabilities without the edge, in fp32.

    The tokens c are those of greatest log q(c|y), maximized over parents y: the `num_parents` most probable tokens of
    the previous depth (at the first depth the root), and no parent. The log-odds of the choices take the place of the
    logits; the gates of the edge have been divided by the temperatures.
    """
    parents_BDP = topk_logprob(logits_BDV, num_parents, choice)[0]
    rank, size = edge.gate_BDR.shape[-1], edge.successor_VR.itemsize
    kernel = select("shortlist", shortlist_reference, logits_BDV, num_tokens=count, rank=rank, rank_bytes=size)
    return kernel(logits_BDV, root_B, parents_BDP, edge, count, choice)


def shortlist_reference(
    logits_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors, count: int, choice: ChoiceModel | None
) -> tuple[Tensor, Tensor]:
    alone_BDV = log_odds(logits_BDV, choice).float().log_softmax(-1)
    token_BDC = _best_logprob(alone_BDV, root_B, parents_BDP, edge).topk(count)[1]
    return token_BDC, alone_BDV.gather(-1, token_BDC)


def _best_logprob(alone_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors) -> Tensor:
    """Return the log-probability of each token, maximized over its parents.

    One product serves all parents of a request, so that the factors are read once. Requests are processed in turn,
    because (D, P, V) numbers per request are many.
    """
    first_B1P = root_B[:, None, None].expand(-1, 1, parents_BDP.shape[-1])
    parent_BDP = torch.cat((first_B1P, parents_BDP[:, :-1]), 1)
    best = []
    for row, alone_DV in enumerate(alone_BDV):
        given_DPV = edge.term(row, parent_BDP[row]).add_(alone_DV[:, None])
        given_DPV -= given_DPV.logsumexp(-1, keepdim=True)
        best.append(torch.maximum(alone_DV, given_DPV.amax(1)))
    return torch.stack(best)
