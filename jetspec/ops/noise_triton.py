"""Noise of sampled choices in Triton kernels: equal to `noise.gumbel` but for the last bits of logarithms."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gumbel(seed, position, block):
    """Return the Gumbel noise of the four tokens of each block, in token order: (4 X,) of blocks (X,) at one position,
    (P, 4 X) of blocks (1, X) at positions (P, 1)."""
    w0, w1, w2, w3 = _words(seed, position, block)
    return _noise(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def gumbel_at(seed, position, token):
    """Return the Gumbel noise of tokens in any order."""
    w0, w1, w2, w3 = _words(seed, position, token // 4)
    lane = token % 4
    return _noise(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _words(seed, position, block):
    """Return the four words of `philox` at counters (block, position, 0, 0)."""
    position = position.to(tl.int32) + tl.zeros_like(block).to(tl.int32)
    zero = tl.zeros_like(position)
    return tl.philox(seed, zero + block.to(tl.int32), position, zero, zero)


@triton.jit
def _noise(words):
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # log1p(-u): the quotient corrects the rounding of 1 - u.
    rest = 1 - uniform
    log1p = tl.where(rest == 1, -uniform, tl.log(rest) * (uniform / (1 - rest)))
    return -tl.log(-log1p)
