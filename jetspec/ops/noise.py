"""Noise of sampled choices: a function of seed, position and token alone, so it is known before the round."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def gumbel(seed_B: Tensor, position_B: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise (B, V), float32: a function of (seed, position, token) alone.

    Token t uses word t % 4 of the generator's block t // 4.
    """
    block_Q = torch.arange(-(-vocab // 4), device=seed_B.device)[None]
    zero = torch.zeros_like(block_Q[:, :1])
    key = (seed_B[:, None] & _MASK32, seed_B[:, None] >> 32 & _MASK32)
    words = philox((block_Q, position_B[:, None], zero, zero), key)
    return _noise(torch.stack(words, dim=-1).flatten(1)[:, :vocab])


def gumbel_at(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """`gumbel` of some tokens, for tensors of one shape."""
    zero = torch.zeros_like(token)
    words = philox((token // 4, position, zero, zero), (seed & _MASK32, seed >> 32 & _MASK32))
    return _noise(torch.stack(words, dim=-1).gather(-1, (token % 4)[..., None])[..., 0])


def _noise(word: Tensor) -> Tensor:
    # The token with the smallest exponential over its probability wins: small u decide, so log1p keeps them precise.
    # The largest u would round to 1 and give infinity.
    uniform = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


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
