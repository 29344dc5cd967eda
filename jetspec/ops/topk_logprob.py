"""The best tokens of a distribution with their exact log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.select import uses_kernel

SORTED_K = 32
"""Most tokens that the kernels find by sorting; the longer a list, the less a sort of it pays."""
MAX_K = 2048
"""Most tokens that kernels find; more are left to torch."""


def topk_logprob(logits: Tensor, k: int, temperature_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(..., V) logits -> the k best tokens, best first, and their log-probabilities over all of V, in fp32.

    With `temperature_B`, the logits are (B, D, V) and to be divided by it. Equal ones may come in any order; the
    kernel puts the lower token first.
    """
    if uses_kernel(logits) and k <= SORTED_K:
        from jetspec.ops.topk_logprob_triton import topk_logprob_triton

        return topk_logprob_triton(logits, k, temperature_B)
    logits = apply_temperature(logits, temperature_B)
    if uses_kernel(logits) and k <= MAX_K:
        from jetspec.ops.topk_select_triton import topk_select_triton

        return topk_select_triton(logits, k)
    wide = logits.float()
    value, token = wide.topk(k, dim=-1)
    return token, value - torch.logsumexp(wide, dim=-1, keepdim=True)


def apply_temperature(x_BDX: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Divided by the temperature of each request, in fp32. Without temperatures it is left as it is."""
    return x_BDX if temperature_B is None else x_BDX / temperature_B[:, None, None]
