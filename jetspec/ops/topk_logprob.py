"""The best tokens of a distribution with their exact log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_logprob(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(..., V) logits -> the k best tokens, best first, and their log-probabilities over all of V, in fp32."""
    wide = logits.float()
    value, token = wide.topk(k, dim=-1)
    return token, value - torch.logsumexp(wide, dim=-1, keepdim=True)
