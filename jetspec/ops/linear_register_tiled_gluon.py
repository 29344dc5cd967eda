"""The kernel of products of a few rows with a small weight, which are a matter of latency.

It is written in Gluon, the language below Triton, where a program sets which thread holds which element. Every thread
loads its tensor core operands straight into registers, without shared memory, the weight while the previous kernel
still runs; warps share only their sums. So a product waits once for the memory and once for other warps.

Layout: x (T, K), weight (N, K) or, gated, (2 N, K) with the gate first, out (T, N), all contiguous. A program computes
16 outputs of 16 rows, and each of its warps has its own range of K.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jetspec.ops.fragments_gluon import index
from jetspec.ops.layouts import REGISTER_BLOCK, RegisterTiles, register_tiles
from jetspec.ops.linear_triton import Epilogue, TiledLinear
from jetspec.ops.overlap_triton import launch, wait

BLOCK = gl.constexpr(REGISTER_BLOCK)


def _plan(x_TK: Tensor, weight: Tensor, outputs: int, gated: bool, adds: bool) -> RegisterTiles | None:
    return register_tiles(x_TK.shape[1], gated)


def _launch(tiles: RegisterTiles, x_TK: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    T, N = out.shape
    grid = triton.cdiv(N, REGISTER_BLOCK), triton.cdiv(T, REGISTER_BLOCK)
    operands = x_TK, weight, epilogue.operands(out), epilogue.numbers(out)
    sizes = {"K": x_TK.shape[1], "GATED": epilogue.gated, "PARTS": epilogue.parts, "tiles": tiles}
    launch(_register_tiled_linear_kernel, grid, *operands, **sizes, num_warps=tiles.WARPS)


REGISTER_TILED = TiledLinear(_plan, _launch)


@gluon.jit
def _register_tiled_linear_kernel(
    x_ptr,
    weight_ptr,
    operands,
    numbers,
    K: gl.constexpr,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
    tiles: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """16 outputs of 16 rows: every warp multiplies its own range of K, then the warps' sums are added."""
    bias_ptr, squares_ptr, total_ptr, out_ptr, next_norm_ptr, scaled_ptr, next_squares_ptr, tap_ptr = operands
    T, N, num_parts, tap_stride, eps = numbers
    WARPS: gl.constexpr = tiles.WARPS
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK, 8])
    # Neighbouring threads hold neighbouring outputs, each with the sums of all warps.
    per_thread: gl.constexpr = BLOCK * BLOCK // (32 * WARPS) if WARPS <= 8 else 1
    lanes: gl.constexpr = BLOCK // per_thread
    shared_out: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, per_thread], [1, 32 // lanes, lanes], [1, WARPS, 1], [2, 1, 0]
    )
    results: gl.constexpr = gl.SliceLayout(0, shared_out)

    first, first_token = gl.program_id(0) * BLOCK, gl.program_id(1) * BLOCK
    token = first_token + gl.arange(0, BLOCK, gl.SliceLayout(1, results))
    output = first + gl.arange(0, BLOCK, gl.SliceLayout(0, results))
    inside = (token < T)[:, None] & (output < N)[None, :]
    place = token[:, None] * N + output[None, :]

    # load the weight and all that the previous kernel does not write
    weight = _load(weight_ptr, first, N - 1, K, tiles, 1, sums)
    if GATED:
        up_weight = _load(weight_ptr + N * K, first, N - 1, K, tiles, 1, sums)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(gl.float32)
    if next_norm_ptr is not None:
        norm = gl.load(next_norm_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    wait(OVERLAP)

    # load x, squares and residual
    x = _load(x_ptr, first_token, T - 1, K, tiles, 0, sums)
    if squares_ptr is not None:
        rows: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [WARPS, 1], [1, 0])
        square_token = first_token + gl.arange(0, BLOCK, gl.SliceLayout(1, rows))
        part = gl.arange(0, PARTS, gl.SliceLayout(0, rows))
        known = (part < num_parts)[None, :] & (square_token < T)[:, None]
        squares = gl.load(squares_ptr + part[None, :] * T + square_token[:, None], mask=known, other=0.0)
    if total_ptr is not None:
        before = gl.load(total_ptr + place, mask=inside, other=0.0).to(gl.float32)

    # multiply, add the sums of all warps
    zero = gl.zeros([WARPS, BLOCK, BLOCK], gl.float32, sums)
    y = gl.sum(gl.convert_layout(_multiply(x, weight, zero, tiles), shared_out), 0)
    if GATED:
        up = gl.sum(gl.convert_layout(_multiply(x, up_weight, zero, tiles), shared_out), 0)
    # divide by the root mean square, bias, gate, residual
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
    # store, begin the next norm
    rounded = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + place, rounded, mask=inside)
    if tap_ptr is not None:
        gl.store(tap_ptr + token[:, None] * tap_stride + output[None, :], rounded, mask=inside)
    if next_norm_ptr is not None:
        wide = gl.where(inside, rounded.to(gl.float32), 0.0)
        gl.store(scaled_ptr + place, (wide * norm[None, :]).to(scaled_ptr.dtype.element_ty), mask=inside)
        gl.store(next_squares_ptr + gl.program_id(0) * T + token, gl.sum(wide * wide, 1), mask=token < T)


@gluon.jit
def _load(ptr, first, last, K: gl.constexpr, tiles: gl.constexpr, OPERAND: gl.constexpr, sums: gl.constexpr):
    """Loads rows of a factor from `first` on, in up to three parts of K. Rows past the last repeat it."""
    WARPS: gl.constexpr = tiles.WARPS
    part = _load_part(ptr, first, last, 0, K, WARPS, tiles.C1, OPERAND, sums)
    if tiles.C2 == 0:
        return (part,)
    else:
        second = _load_part(ptr, first, last, WARPS * tiles.C1, K, WARPS, tiles.C2, OPERAND, sums)
        if tiles.C3 == 0:
            return (part, second)
        else:
            third = _load_part(ptr, first, last, WARPS * (tiles.C1 + tiles.C2), K, WARPS, tiles.C3, OPERAND, sums)
            return (part, second, third)


@gluon.jit
def _load_part(
    ptr,
    first,
    last,
    start: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    C: gl.constexpr,
    OPERAND: gl.constexpr,
    sums: gl.constexpr,
):
    """Loads columns from `start` on, C for each warp: (WARPS, BLOCK, C) on the left of a product, (WARPS, C, BLOCK) on
    its right. Both factors may permute K alike, so a thread holds up to eight neighbours, where the tensor core's own
    order has pairs: 16-byte loads."""
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, sums, 8 if C >= 64 else C // 8)
    row = index(BLOCK, 1 + OPERAND, layout)
    column = start + index(WARPS, 0, layout) * C + index(C, 2 - OPERAND, layout)
    place = gl.minimum(first + row, last) * K + column
    if start + WARPS * C <= K:
        return gl.load(ptr + place)
    else:
        return gl.load(ptr + place, mask=column + 0 * row < K, other=0.0)


@gluon.jit
def _multiply(x, weight, y, tiles: gl.constexpr):
    y = mma_v2(x[0], weight[0], y)
    if tiles.C2 > 0:
        y = mma_v2(x[1], weight[1], y)
    if tiles.C3 > 0:
        y = mma_v2(x[2], weight[2], y)
    return y
