"""The best tokens of a distribution with their exact log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.dispatch import uses_kernel

SORTED_K = 32
"""Most tokens that the kernels find by sorting; the longer a list, the less a sort of it pays."""
MAX_K = 2048
"""Most tokens that kernels find; more are left to torch."""


def topk_logprob(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(..., V) logits -> the k best tokens, best first, and their log-probabilities over all of V, in fp32.

    Equal logits may come in any order; the kernel puts the lower token first.
    """
    if uses_kernel(logits) and k <= MAX_K:
        if k <= SORTED_K:
            from jetspec.ops.topk_logprob_triton import topk_logprob_triton

            return topk_logprob_triton(logits, k)
        from jetspec.ops.topk_select_triton import topk_select_triton

        return topk_select_triton(logits, k)
    wide = logits.float()
    value, token = wide.topk(k, dim=-1)
    return token, value - torch.logsumexp(wide, dim=-1, keepdim=True)
