"""The Triton kernels of products with one row, and with a few: norm, gate and residual included.

The work is to read the weight once at the speed of the memory; what stands around a product costs nothing inside it,
but a launch and a pause of the memory as a kernel of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetspec.ops.overlap_triton import overlap, wait

BLOCK_K = 2048
TILE = 4096
"""Products that a program keeps apart, for one row."""


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
        num_warps=4 if norm is None else 8,
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
    """Some outputs of one row. Each product is kept apart until the end, so that nothing but loads stands between two
    blocks of the weight. The norm divides by a number that is known at the end, and is applied there.

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


class RowTiling(NamedTuple):
    """Block sizes for a few rows, and how to run them."""

    BLOCK_M: int
    BLOCK_N: int
    """Outputs: so few that all multiprocessors have some."""
    BLOCK_K: int
    num_warps: int
    num_stages: int
    """Blocks of the weight on their way."""


def rows_linear_triton(
    x_TK: Tensor, weight: Tensor, bias: Tensor | None, *, squares: Tensor, eps: float, gated: bool = False
) -> Tensor:
    """The product of rows that are scaled but not divided yet; `squares` (parts, T) sum up to what they are divided
    by."""
    N = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((len(x_TK), N), dtype=x_TK.dtype, device=x_TK.device)
    _launch_rows(x_TK, weight, bias, out, gated=gated, squares=squares, eps=eps)
    return out


def rows_add_linear_triton(
    total_TN: Tensor, x_TK: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds to `total_TN`. Returns it scaled by the weight of a norm, and its sums of squares (parts, T)."""
    T, N = total_TN.shape
    scaled = torch.empty_like(total_TN)
    parts = triton.cdiv(N, _choose_tiling(T, N, gated=False).BLOCK_N)
    squares = torch.empty((parts, T), dtype=torch.float32, device=total_TN.device)
    _launch_rows(x_TK, weight, bias, total_TN, total=total_TN, next_norm=norm, scaled=scaled, next_squares=squares)
    return scaled, squares


def _launch_rows(
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    squares: Tensor | None = None,
    eps: float = 0.0,
    total: Tensor | None = None,
    next_norm: Tensor | None = None,
    scaled: Tensor | None = None,
    next_squares: Tensor | None = None,
) -> None:
    (T, K), N = x_TK.shape, out.shape[1]
    tiling = _choose_tiling(T, N, gated)
    with torch.cuda.device_of(x_TK):
        _rows_linear_kernel[(triton.cdiv(N, tiling.BLOCK_N),)](
            TensorDescriptor.from_tensor(x_TK, [tiling.BLOCK_M, tiling.BLOCK_K]),
            TensorDescriptor.from_tensor(weight, [tiling.BLOCK_N, tiling.BLOCK_K]),
            bias,
            squares,
            total,
            out,
            next_norm,
            scaled,
            next_squares,
            T,
            N,
            K,
            0 if squares is None else len(squares),
            eps,
            GATED=gated,
            PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
            **tiling._asdict(),
            **overlap(x_TK),
        )


def has_copy_engine(x: Tensor) -> bool:
    """Of Hopper and later; on a CPU the interpreter stands in for it. It is worth while for 16 bits, whose products
    tensor cores make."""
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    return capable and (x.itemsize == 2 or not x.is_cuda)


def can_copy(x: Tensor) -> bool:
    """Whether the copy engine can read a matrix: its rows start at multiples of 16 bytes."""
    return x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _choose_tiling(rows: int, outputs: int, gated: bool) -> RowTiling:
    block_m = max(16, triton.next_power_of_2(rows))
    wide = outputs * (2 if gated else 1) > 4096
    block_n = (64 if wide else 32) // (2 if gated else 1)
    if block_m > 64:
        return RowTiling(block_m, block_n, 128, num_warps=8, num_stages=4)
    return RowTiling(block_m, block_n, 128 if wide else 256, num_warps=4, num_stages=5 if wide else 4)


@triton.jit
def _rows_linear_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    squares_ptr,
    total_ptr,
    out_ptr,
    next_norm_ptr,
    scaled_ptr,
    next_squares_ptr,
    T,
    N,
    K,
    num_parts,
    eps,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Some outputs of all rows.

    A norm is spread over two kernels, so that none of its own is needed: who writes a stream scales it by the norm's
    weight and sums up the squares of its part of each row, and who reads it divides the product.
    """
    first = tl.program_id(0) * BLOCK_N
    token = tl.arange(0, BLOCK_M)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait(OVERLAP)
    if squares_ptr is not None:  # asked for now, looked at in the end
        part = tl.arange(0, PARTS)
        known = (part < num_parts)[:, None] & (token < T)[None, :]
        squares = tl.load(squares_ptr + part[:, None] * T + token[None, :], mask=known, other=0.0)
    for start in tl.range(0, K, BLOCK_K):
        weight = weight_desc.load([first, start])
        x = x_desc.load([0, start])
        y = tl.dot(x, weight.T, y, input_precision="ieee")
        if GATED:
            up = tl.dot(x, weight_desc.load([N + first, start]).T, up, input_precision="ieee")

    output = first + tl.arange(0, BLOCK_N)
    if squares_ptr is not None:
        divisor = tl.sqrt(tl.sum(squares, 0) / K + eps)[:, None]
        y /= divisor
        up /= divisor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = y * tl.sigmoid(y) * up
    place = token.to(tl.int64)[:, None] * N + output[None, :]
    inside = (token < T)[:, None] & (output < N)[None, :]
    if total_ptr is not None:
        y += tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, rounded, mask=inside)
    if next_norm_ptr is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        norm = tl.load(next_norm_ptr + output, mask=output < N, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * norm[None, :]).to(scaled_ptr.dtype.element_ty), mask=inside)
        tl.store(next_squares_ptr + tl.program_id(0) * T + token, tl.sum(wide * wide, 1), mask=token < T)
