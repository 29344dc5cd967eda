"""Log-probabilities of committed tokens under the target, from the logits of the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec import ops
from jetspec.tree import Acceptance
from jetspec.types import MAX_LOGPROBS, TokenLogprob


@dataclass(frozen=True)
class PathLogprobs:
    """Log-probability of every committed token of a round, and the most probable tokens at its position."""

    logprob_BD1: Tensor
    top_BD1K: Tensor
    top_logprob_BD1K: Tensor

    @classmethod
    def of(cls, logits_BNV: Tensor, verdict: Acceptance) -> PathLogprobs:
        """The logits of path[i] choose the token after it. No host sync."""
        vocab = logits_BNV.shape[-1]
        logits_BD1V = logits_BNV.gather(1, verdict.path_BD1[..., None].expand(-1, -1, vocab))
        top_BD1K, top_logprob_BD1K = ops.topk_logprob(logits_BD1V, min(MAX_LOGPROBS, vocab))
        # The best token's logit and log-probability differ by the logarithm of the sum, which all tokens share.
        logit_BD12 = logits_BD1V.gather(2, torch.stack((verdict.token_BD1, top_BD1K[..., 0]), -1)).float()
        logprob_BD1 = logit_BD12[..., 0] - logit_BD12[..., 1] + top_logprob_BD1K[..., 0]
        return cls(logprob_BD1, top_BD1K, top_logprob_BD1K)

    @property
    def packed_BX(self) -> Tensor:
        """All values concatenated per token. float64 holds both token ids and log-probabilities exactly."""
        parts = (self.logprob_BD1[..., None], self.top_BD1K, self.top_logprob_BD1K)
        return torch.cat([part.double() for part in parts], -1).flatten(1)

    def unpack(self, packed: Sequence[float], tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Decodes one request's row of `packed_BX` for the tokens that it kept."""
        num_best = self.top_BD1K.shape[-1]
        found = []
        for i, token in enumerate(tokens):
            logprob, *best = packed[i * (1 + 2 * num_best) : (i + 1) * (1 + 2 * num_best)]
            top = zip(map(int, best[:num_top]), best[num_best : num_best + num_top], strict=True)
            found.append(TokenLogprob(token, logprob, list(top)))
        return found
