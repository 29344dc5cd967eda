"""Candidates: the tokens that a draft head proposes for every depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.types import EdgeFactors


@dataclass(frozen=True)
class Candidates:
    """C tokens per depth with full-vocabulary log-probabilities (float32), best first; with an edge term, in any order.

    Depth d, counted from 1, is row d - 1. A log-probability of -inf marks an absent candidate: it sorts last, and its
    token may be any valid id.
    """

    token_BDC: Tensor
    logprob_BDC: Tensor
    entropy_BD: Tensor | None = None
    edge: EdgeFactors | None = None

    def children(self, depth: int, parent_BW: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the K = min(width, C) best tokens at `depth` for each parent token: token_BWK, logprob_BWK.

        Without edges all parents share one list. With edges each parent re-ranks the shortlist, which keeps its mass:
        log q(c|y) = z_c - logsumexp(z) + logsumexp(logprob) with z = logprob + edge, summed over the shortlist.
        """
        token_BC, logprob_BC = self.token_BDC[:, depth - 1], self.logprob_BDC[:, depth - 1]
        num_parents = parent_BW.shape[1]
        token_BWC = token_BC[:, None].expand(-1, num_parents, -1)
        logprob_BWC = logprob_BC[:, None].expand(-1, num_parents, -1)
        if self.edge is None:
            return token_BWC[..., :width], logprob_BWC[..., :width]

        z_BWC = logprob_BWC + self.edge.score(depth, parent_BW, token_BC)
        # One call for both sums: equal rows give equal bits, so an edge of 0 changes nothing. The clamp keeps a depth
        # without candidates at -inf instead of NaN.
        mass_2BW = torch.stack((logprob_BWC, z_BWC)).logsumexp(-1).clamp(min=torch.finfo(torch.float32).min)
        ranked_BWC, order_BWC = (z_BWC - (mass_2BW[1] - mass_2BW[0])[..., None]).sort(descending=True, stable=True)
        return token_BWC.gather(-1, order_BWC[..., :width]), ranked_BWC[..., :width]
