"""The Triton kernel of products with a single row, norm, gate and residual included.

The work is to read the weight once at the speed of the memory. Each program keeps the products of a few outputs apart
until the end, so that nothing but loads stands between two blocks of the weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait

BLOCK_K = 1024
TILE = 8192
"""Products that a program keeps apart."""


def vector_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    total: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    N, K = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    block_k = min(BLOCK_K, triton.next_power_of_2(K))
    block_n = max(1, TILE // block_k // (2 if gated else 1))
    _vector_linear_kernel[(triton.cdiv(N, block_n),)](
        x.contiguous(),
        weight,
        bias,
        norm,
        None if total is None else total.contiguous(),
        out,
        N,
        eps,
        K=K,
        GATED=gated,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **overlap(x),
    )
    return out


@triton.jit
def _vector_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    total_ptr,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Some outputs. The norm divides by a number that is known at the end, and is applied there.

    The weight is always read one block ahead, and its first block while the kernel before this one still runs.
    """
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = output < N
    lane = tl.arange(0, BLOCK_K)
    row = weight_ptr + tl.minimum(output, N - 1).to(tl.int64)[:, None] * K + lane[None, :]
    up_row = row + N.to(tl.int64) * K
    products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    weight = tl.load(row, mask=(lane < K)[None, :], other=0.0)
    up_weight = weight
    if GATED:
        up_weight = tl.load(up_row, mask=(lane < K)[None, :], other=0.0)
    wait(OVERLAP)
    for start in tl.range(0, K, BLOCK_K):
        ahead = start + BLOCK_K
        next_weight = tl.load(row + ahead, mask=(ahead + lane < K)[None, :], other=0.0)
        next_up_weight = next_weight
        if GATED:
            next_up_weight = tl.load(up_row + ahead, mask=(ahead + lane < K)[None, :], other=0.0)
        x = tl.load(x_ptr + start + lane, mask=start + lane < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + start + lane, mask=start + lane < K, other=0.0).to(tl.float32)
        products += weight.to(tl.float32) * x[None, :]
        weight = next_weight
        if GATED:
            up_products += up_weight.to(tl.float32) * x[None, :]
            up_weight = next_up_weight

    y = tl.sum(products, 1)
    up = tl.sum(up_products, 1)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        y *= scale
        up *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + output, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    if total_ptr is not None:
        y += tl.load(total_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, y.to(out_ptr.dtype.element_ty), mask=inside)
