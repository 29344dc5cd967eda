"""Top-k tokens of a distribution with their exact log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.select import select


def topk_logprob(logits: Tensor, k: int, temperature_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k best tokens of (..., V) logits, best first, and their log-probabilities over all of V, in fp32.

    With `temperature_B`, the logits are (B, D, V) and are divided by it. Equal logits may come in any order; the kernel
    puts the lower token first.
    """
    return select("topk_logprob", topk_logprob_reference, logits, num_tokens=k)(logits, k, temperature_B)


def topk_logprob_reference(logits: Tensor, k: int, temperature_B: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = apply_temperature(logits, temperature_B).float()
    value, token = wide.topk(k, dim=-1)
    return token, value - torch.logsumexp(wide, dim=-1, keepdim=True)


def apply_temperature(x_BDX: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Divide by the temperature of each request, in fp32. Without temperatures return the input."""
    return x_BDX if temperature_B is None else x_BDX / temperature_B[:, None, None]
