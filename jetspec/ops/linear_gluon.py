"""The kernel of products of a few rows with a small weight, which are a matter of latency.

It is written in Gluon, the language below Triton, where a program says which thread holds what. Triton would bring both
factors to shared memory; here every thread loads what its tensor core wants from it, the weight while the kernel ahead
still runs, and warps share nothing but their sums. So a product waits once for the memory and once for other warps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jetspec.ops.fragments_gluon import index, wait
from jetspec.ops.overlap_triton import overlap

BLOCK_M = BLOCK_N = 16
MOST_COLUMNS = 352
"""That a warp takes: registers hold them, of 16 rows and of 16 outputs, or half as many if those have gates."""
MAX_PARTS = 3


class Slices(NamedTuple):
    """How the columns of both factors are shared out: each warp has C1 of the first, C2 of what is left, then C3, all
    powers of two. There may be more than columns are left."""

    WARPS: int
    C1: int
    C2: int = 0
    C3: int = 0

    @property
    def width(self) -> int:
        """Outputs of a program."""
        return BLOCK_N


def find_slices(columns: int, gated: bool) -> Slices | None:
    """For the fewest warps that can hold all columns; None if no number can, or if rows do not start at multiples of 16
    bytes."""
    most = MOST_COLUMNS // 2 if gated else MOST_COLUMNS
    for warps in (4, 8, 16):
        for own in range(triton.cdiv(columns, 16 * warps) * 16, most + 1, 16):
            parts = [1 << bit for bit in reversed(range(own.bit_length())) if own >> bit & 1]
            if len(parts) <= MAX_PARTS and columns % 8 == 0:
                return Slices(warps, *parts)
    return None


def sliced_linear_gluon(
    slices: Slices,
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
    tap: Tensor | None = None,
) -> None:
    """What the tiles of `linear_triton` do."""
    (T, K), N = x_TK.shape, out.shape[1]
    with torch.cuda.device_of(x_TK):
        _sliced_linear_kernel[(triton.cdiv(N, BLOCK_N), triton.cdiv(T, BLOCK_M))](
            x_TK,
            weight,
            bias,
            squares,
            total,
            out,
            next_norm,
            scaled,
            next_squares,
            tap,
            T,
            N,
            0 if squares is None else len(squares),
            0 if tap is None else tap.stride(0),
            eps,
            K=K,
            GATED=gated,
            PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=slices.WARPS,
            **slices._asdict(),
            **overlap(x_TK),
        )


@gluon.jit
def _sliced_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    total_ptr,
    out_ptr,
    next_norm_ptr,
    scaled_ptr,
    next_squares_ptr,
    tap_ptr,
    T,
    N,
    num_parts,
    tap_stride,
    eps,
    K: gl.constexpr,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    C1: gl.constexpr,
    C2: gl.constexpr,
    C3: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """Some outputs of some rows: every warp multiplies its own columns, then they add up."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK_M, 8])
    # Neighbouring threads hold neighbouring outputs, each of them the sums of all warps.
    per_thread: gl.constexpr = BLOCK_M * BLOCK_N // (32 * WARPS) if WARPS <= 8 else 1
    lanes: gl.constexpr = BLOCK_N // per_thread
    shared_out: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, per_thread], [1, 32 // lanes, lanes], [1, WARPS, 1], [2, 1, 0]
    )
    results: gl.constexpr = gl.SliceLayout(0, shared_out)

    first, first_token = gl.program_id(0) * BLOCK_N, gl.program_id(1) * BLOCK_M
    token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, results))
    output = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, results))
    inside = (token < T)[:, None] & (output < N)[None, :]
    place = token[:, None] * N + output[None, :]

    # What is older than the kernel ahead.
    weight = _load(weight_ptr, first, N - 1, K, WARPS, BLOCK_N, C1, C2, C3, 1, sums)
    if GATED:
        up_weight = _load(weight_ptr + N * K, first, N - 1, K, WARPS, BLOCK_N, C1, C2, C3, 1, sums)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(gl.float32)
    if next_norm_ptr is not None:
        norm = gl.load(next_norm_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    wait(OVERLAP)

    x = _load(x_ptr, first_token, T - 1, K, WARPS, BLOCK_M, C1, C2, C3, 0, sums)
    if squares_ptr is not None:
        rows: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [WARPS, 1], [1, 0])
        square_token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, rows))
        part = gl.arange(0, PARTS, gl.SliceLayout(0, rows))
        known = (part < num_parts)[None, :] & (square_token < T)[:, None]
        squares = gl.load(squares_ptr + part[None, :] * T + square_token[:, None], mask=known, other=0.0)
    if total_ptr is not None:
        before = gl.load(total_ptr + place, mask=inside, other=0.0).to(gl.float32)

    zero = gl.zeros([WARPS, BLOCK_M, BLOCK_N], gl.float32, sums)
    y = gl.sum(gl.convert_layout(_multiply(x, weight, zero, C2, C3), shared_out), 0)
    if GATED:
        up = gl.sum(gl.convert_layout(_multiply(x, up_weight, zero, C2, C3), shared_out), 0)
    if squares_ptr is not None:
        mean = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(1, results)) / K
        divisor = gl.sqrt(mean + eps)[:, None]
        y /= divisor
        if GATED:
            up /= divisor
    if bias_ptr is not None:
        y += bias[None, :]
        if GATED:
            up += up_bias[None, :]
    if GATED:
        y = y / (1 + gl.exp(-y)) * up
    if total_ptr is not None:
        y += before
    rounded = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + place, rounded, mask=inside)
    if tap_ptr is not None:
        gl.store(tap_ptr + token[:, None] * tap_stride + output[None, :], rounded, mask=inside)
    if next_norm_ptr is not None:
        wide = gl.where(inside, rounded.to(gl.float32), 0.0)
        gl.store(scaled_ptr + place, (wide * norm[None, :]).to(scaled_ptr.dtype.element_ty), mask=inside)
        gl.store(next_squares_ptr + gl.program_id(0) * T + token, gl.sum(wide * wide, 1), mask=token < T)


@gluon.jit
def _load(
    ptr,
    first,
    last,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    ROWS: gl.constexpr,
    C1: gl.constexpr,
    C2: gl.constexpr,
    C3: gl.constexpr,
    OPERAND: gl.constexpr,
    sums: gl.constexpr,
):
    """Rows of a factor from `first` on, up to three parts of them. Rows past the last repeat it."""
    part = _load_part(ptr, first, last, 0, K, WARPS, ROWS, C1, OPERAND, sums)
    if C2 == 0:
        return (part,)
    else:
        second = _load_part(ptr, first, last, WARPS * C1, K, WARPS, ROWS, C2, OPERAND, sums)
        if C3 == 0:
            return (part, second)
        else:
            third = _load_part(ptr, first, last, WARPS * (C1 + C2), K, WARPS, ROWS, C3, OPERAND, sums)
            return (part, second, third)


@gluon.jit
def _load_part(
    ptr,
    first,
    last,
    start: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    ROWS: gl.constexpr,
    C: gl.constexpr,
    OPERAND: gl.constexpr,
    sums: gl.constexpr,
):
    """Columns from `start` on, C for each warp: (WARPS, ROWS, C) on the left of a product, (WARPS, C, ROWS) on its
    right. The order of columns does not matter as long as it is that of the other factor, so a thread takes neighbours,
    up to eight, where the tensor core's own order has pairs."""
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, sums, 8 if C >= 64 else C // 8)
    row = index(ROWS, 1 + OPERAND, layout)
    column = start + index(WARPS, 0, layout) * C + index(C, 2 - OPERAND, layout)
    place = gl.minimum(first + row, last) * K + column
    if start + WARPS * C <= K:
        return gl.load(ptr + place)
    else:
        return gl.load(ptr + place, mask=column + 0 * row < K, other=0.0)


@gluon.jit
def _multiply(x, weight, y, C2: gl.constexpr, C3: gl.constexpr):
    y = mma_v2(x[0], weight[0], y)
    if C2 > 0:
        y = mma_v2(x[1], weight[1], y)
    if C3 > 0:
        y = mma_v2(x[2], weight[2], y)
    return y
