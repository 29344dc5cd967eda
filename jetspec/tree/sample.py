"""Sampling at a node: argmax, or a draw that depends only on (seed, position, token).

Adding Gumbel noise to log-probabilities and taking the argmax samples from them. The noise comes from a counter-based
generator, so the token of a request at a position does not depend on the tree, batch or device that verifies it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetspec.ops.select import select
from jetspec.types import RowSampling

_MASK32 = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def choose_token(logits_BV: Tensor, sampling: RowSampling, position_B: Tensor) -> Tensor:
    """Return the target's token at each row's position: argmax for greedy rows, a draw for the others. int64 (B,)."""
    greedy_B = logits_BV.argmax(-1)
    if not sampling.any_sampled:
        return greedy_B
    noise_BV = gumbel(sampling.seed_B, position_B, logits_BV.shape[-1])
    sampled_B = (filter_logits(logits_BV, sampling) + noise_BV).argmax(-1)
    return torch.where(sampling.temperature_B > 0, sampled_B, greedy_B)


def choose_nodes(logits_BNV: Tensor, sampling: RowSampling, position_BN: Tensor) -> Tensor:
    """`choose_token` for several nodes per request, which share its sampling parameters. int64 (B, N)."""
    return select("choose_nodes", choose_nodes_reference, logits_BNV)(logits_BNV, sampling, position_BN)


def choose_nodes_reference(logits_BNV: Tensor, sampling: RowSampling, position_BN: Tensor) -> Tensor:
    num_nodes = logits_BNV.shape[1]
    columns: dict[str, Any] = {
        k: v.repeat_interleave(num_nodes) for k, v in vars(sampling).items() if torch.is_tensor(v)
    }
    token_T = choose_token(logits_BNV.flatten(0, 1), replace(sampling, **columns), position_BN.flatten())
    return token_T.unflatten(0, (-1, num_nodes))


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

    vocab = logits_BV.shape[-1]
    sorted_BV = logits_BV.sort(descending=True).values
    top_k_B = torch.where(sampling.top_k_B > 0, sampling.top_k_B, vocab).clamp(max=vocab)
    kth_B1 = sorted_BV.gather(1, top_k_B[:, None] - 1)

    prob_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, -torch.inf).softmax(-1)
    tail_BV = prob_BV.flip(-1).cumsum(-1).flip(-1)  # mass of a token and all below it; 0 where top-k dropped it
    num_kept_B = (tail_BV > 1 - sampling.top_p_B[:, None]).sum(-1).clamp(min=1)
    last_B1 = sorted_BV.gather(1, num_kept_B[:, None] - 1)

    min_p_B1 = sorted_BV[:, :1] + sampling.min_p_B[:, None].log()
    return logits_BV.masked_fill(logits_BV < torch.maximum(last_B1, min_p_B1), -torch.inf)


def gumbel(seed_B: Tensor, position_B: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise (B, V), float32: a function of (seed, position, token) alone.

    Token t uses word t % 4 of the generator's block t // 4.
    """
    block_Q = torch.arange(-(-vocab // 4), device=seed_B.device)[None]
    zero = torch.zeros_like(block_Q[:, :1])
    key = (seed_B[:, None] & _MASK32, seed_B[:, None] >> 32 & _MASK32)
    words = philox((block_Q, position_B[:, None], zero, zero), key)
    word_BV = torch.stack(words, dim=-1).flatten(1)[:, :vocab]
    # The token with the smallest exponential over its probability wins: small u decide, so log1p keeps them precise.
    # The largest u would round to 1 and give infinity.
    uniform_BV = ((word_BV.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform_BV)).log()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., 2011): four random 32-bit words per counter, in int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER[0])
        high1, low1 = _multiply(c2, _MULTIPLIER[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0] & _MASK32, k1 + _WEYL[1] & _MASK32
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a product of 32-bit numbers. int64 wraps around, so it holds all 64 bits."""
    product = x * factor
    return product >> 32 & _MASK32, product & _MASK32
