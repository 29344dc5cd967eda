"""The Triton kernels of products with one row, and with a few: norm, gate and residual included.

The work is to read the weight once at the speed of the memory; what stands around a product costs nothing inside it,
but a launch and a pause of the memory as a kernel of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetspec.ops.overlap_triton import fetch, overlap, wait
from jetspec.ops.rows import new_rows, whole_tiles

if TYPE_CHECKING:
    from jetspec.ops.linear_gluon import Slices

BLOCK_K = 2048
TILE = 4096
"""Products that a program keeps apart, for one row."""
LONG_ROW = 8192
"""Inputs that make one output work enough for a program, which then takes twice as many of them at a time."""

WIDTHS = ((64, True), (64, False), (32, True), (32, False))
"""Outputs of a tile of a few rows, and whether half as many come on top, from the widest to the narrowest."""
SMALL_BYTES = 8 * 2**20
PROGRAMS = 132
"""That run at once on Hopper: each fills a multiprocessor."""
ENOUGH_PROGRAMS = 60
"""That keep the memory busy with very few rows."""
MAX_SLICED_ROWS = 64
"""Rows of a small weight that are sliced: more would read it too often, 16 at a time."""
STAGE_BYTES = 225 * 1024
"""Of the memory of one multiprocessor, for blocks on their way."""


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
    is_long = K >= LONG_ROW
    block_k = min(2 * BLOCK_K if is_long else BLOCK_K, triton.next_power_of_2(K))
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
        num_warps=8 if is_long or norm is not None else 4,
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
    before = tl.zeros([BLOCK_N], tl.float32)
    if total_ptr is not None:  # asked for now, added in the end
        before = tl.load(total_ptr + output, mask=inside, other=0.0).to(tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        next_start = start + BLOCK_K
        next_weight = tl.load(row + next_start, mask=(next_start + lane < K)[None, :], other=0.0)
        next_up_weight = next_weight
        if GATED:
            next_up_weight = tl.load(up_row + next_start, mask=(next_start + lane < K)[None, :], other=0.0)
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
    tl.store(out_ptr + output, (y + before).to(out_ptr.dtype.element_ty), mask=inside)


class RowTiling(NamedTuple):
    """Block sizes for a few rows, and how to run them."""

    BLOCK_M: int
    BLOCK_N: int
    """Outputs. Each program reads all of x for them, so they are many; the programs are as many as multiprocessors."""
    HALF: bool
    """Half as many outputs again, which meets the number of multiprocessors where powers of two do not."""
    BLOCK_K: int
    num_warps: int
    num_stages: int
    """Blocks of the weight on their way."""

    @property
    def width(self) -> int:
        return _width(self.BLOCK_N, self.HALF)


def rows_linear_triton(
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    """The product of rows. `squares` (parts, T) come with rows that are scaled by a norm's weight but not divided yet,
    and sum up to what they are divided by."""
    N = weight.shape[0] // (2 if gated else 1)
    out = new_rows(len(x_TK), N, like=x_TK)
    plan = _choose_plan(x_TK, weight, N, gated)
    _launch_rows(plan, x_TK, weight, bias, out, gated=gated, squares=squares, eps=eps)
    return out


def rows_add_linear_triton(
    total_TN: Tensor, x_TK: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, tap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Adds to `total_TN`, and copies the result to `tap`, whose rows may be far apart. Returns it scaled by the weight
    of a norm, and its sums of squares (parts, T)."""
    T, N = total_TN.shape
    plan = _choose_plan(x_TK, weight, N, gated=False)
    scaled = new_rows(T, N, like=total_TN)
    squares = torch.empty((triton.cdiv(N, plan.width), T), dtype=torch.float32, device=total_TN.device)
    inputs = plan, x_TK, weight, bias, total_TN
    _launch_rows(*inputs, total=total_TN, next_norm=norm, scaled=scaled, next_squares=squares, tap=tap)
    return scaled, squares


def _choose_plan(x_TK: Tensor, weight: Tensor, outputs: int, gated: bool) -> RowTiling | Slices:
    """Slices for a few rows of a small weight, which a GPU alone knows how to read, tiles for all others."""
    if x_TK.is_cuda and len(x_TK) <= MAX_SLICED_ROWS and is_small(weight):
        from jetspec.ops.linear_gluon import find_slices

        if (slices := find_slices(x_TK.shape[1], gated)) is not None:
            return slices
    return _choose_tiling(len(x_TK), outputs, gated)


def _launch_rows(
    plan: RowTiling | Slices, x_TK: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, **options: Any
) -> None:
    if isinstance(plan, RowTiling):
        _launch_tiles(plan, x_TK, weight, bias, out, **options)
    else:
        from jetspec.ops.linear_gluon import sliced_linear_gluon

        sliced_linear_gluon(plan, x_TK, weight, bias, out, **options)


def _launch_tiles(
    tiling: RowTiling,
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
    (T, K), N = x_TK.shape, out.shape[1]
    early = {"EARLY": is_small(weight), **overlap(x_TK)}
    half = TensorDescriptor.from_tensor(weight, [tiling.BLOCK_N // 2, tiling.BLOCK_K]) if tiling.HALF else None
    with torch.cuda.device_of(x_TK):
        _rows_linear_kernel[(triton.cdiv(N, tiling.width), triton.cdiv(T, tiling.BLOCK_M))](
            weight,
            TensorDescriptor.from_tensor(whole_tiles(x_TK, tiling.BLOCK_M), [tiling.BLOCK_M, tiling.BLOCK_K]),
            TensorDescriptor.from_tensor(weight, [tiling.BLOCK_N, tiling.BLOCK_K]),
            half,
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
            K,
            0 if squares is None else len(squares),
            0 if tap is None else tap.stride(0),
            eps,
            GATED=gated,
            PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
            **tiling._asdict(),
            **early,
        )


def has_copy_engine(x: Tensor) -> bool:
    """Of Hopper and later, with memory for the blocks that it brings; on a CPU the interpreter stands in for it. It is
    worth while for 16 bits, whose products tensor cores make."""
    return not x.is_cuda or (x.itemsize == 2 and _has_copy_engine(x.device))


@cache
def _has_copy_engine(device: torch.device) -> bool:
    memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return torch.cuda.get_device_capability(device) >= (9, 0) and memory > STAGE_BYTES


def is_small(weight: Tensor) -> bool:
    """Whether a product with it is a matter of latency. The cache holds it, so that it can be asked for before it is
    needed, and be read once for every 64 rows."""
    return weight.nbytes <= SMALL_BYTES


def can_copy(x: Tensor) -> bool:
    """Whether the copy engine can read a matrix: its rows start at multiples of 16 bytes."""
    return x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _width(block_n: int, half: bool) -> int:
    return block_n + block_n // 2 if half else block_n


def _choose_tiling(rows: int, outputs: int, gated: bool) -> RowTiling:
    """Very few rows cost little to read: the wider of two tiles that keeps the memory busy. Of more rows, tiles with
    which a multiprocessor reads least of both factors, since each tile reads x anew, and those that do not run at once
    run after each other. A small weight is a matter of latency, which the tensor cores' own queue has less of; it takes
    64 rows."""
    is_narrow = triton.cdiv(outputs, WIDTHS[-1][0]) < ENOUGH_PROGRAMS
    block_m = 16 if rows <= 16 and not is_narrow else 64
    sides, row_tiles = 2 if gated else 1, triton.cdiv(rows, block_m)

    def programs(width: tuple[int, bool]) -> int:
        return triton.cdiv(outputs, _width(*width)) * row_tiles

    def rows_read(width: tuple[int, bool]) -> int:
        return triton.cdiv(programs(width), PROGRAMS) * (block_m + sides * _width(*width))

    if block_m == 16:
        block_n, half = WIDTHS[0] if programs(WIDTHS[0]) >= ENOUGH_PROGRAMS else WIDTHS[-1]
    else:
        block_n, half = min(WIDTHS, key=rows_read)
    weight_rows = _width(block_n, half) * sides
    block_k = 256 if block_m == 16 else 128
    while (stages := STAGE_BYTES // ((block_m + weight_rows) * block_k * 2)) < 3:
        block_k //= 2
    return RowTiling(block_m, block_n, half, block_k, num_warps=4, num_stages=min(stages, 6))


@triton.jit
def _rows_linear_kernel(
    weight_ptr,
    x_desc,
    weight_desc,
    half_desc,
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
    K,
    num_parts,
    tap_stride,
    eps,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr = False,
    OVERLAP: tl.constexpr = False,
):
    """Some outputs of BLOCK_M rows. A small weight is asked for EARLY, before the kernel waits for the one before it.

    A norm is spread over two kernels, so that none of its own is needed: who writes a stream scales it by the norm's
    weight and sums up the squares of its part of each row, and who reads it divides the product.
    """
    HALF_N: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0)
    first = tile * (BLOCK_N + HALF_N if HALF else BLOCK_N)
    first_token = tl.program_id(1) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = y
    half_y = tl.zeros([BLOCK_M, HALF_N], tl.float32)
    half_up = half_y
    if EARLY and OVERLAP:
        row_bytes = K * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        own_bytes = tl.minimum(BLOCK_N + HALF_N if HALF else BLOCK_N, N - first) * row_bytes
        fetch(weight_ptr + first * K, own_bytes)
        if GATED:
            fetch(weight_ptr + (N + first) * K, own_bytes)
    wait(OVERLAP)
    # What the end needs is asked for now.
    if squares_ptr is not None:
        part = tl.arange(0, PARTS)
        known = (part < num_parts)[:, None] & (token < T)[None, :]
        squares = tl.load(squares_ptr + part[:, None] * T + token[None, :], mask=known, other=0.0)
    before, half_before = y, half_y
    if total_ptr is not None:
        before = _load_tile(total_ptr, token, first, T, N, BLOCK_N)
        if HALF:
            half_before = _load_tile(total_ptr, token, first + BLOCK_N, T, N, HALF_N)
    for start in tl.range(0, K, BLOCK_K):
        x = x_desc.load([first_token, start])
        y = _product(x, weight_desc, first, start, y)
        if GATED:
            up = _product(x, weight_desc, N + first, start, up)
        if HALF:
            half_y = _product(x, half_desc, first + BLOCK_N, start, half_y)
            if GATED:
                half_up = _product(x, half_desc, N + first + BLOCK_N, start, half_up)

    if squares_ptr is not None:
        divisor = tl.sqrt(tl.sum(squares, 0) / K + eps)[:, None]
        y /= divisor
        up /= divisor
        half_y /= divisor
        half_up /= divisor
    places = bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride
    own_squares = _finish(y, up, before, token, first, *places, T, N, GATED, BLOCK_N)
    if HALF:
        own_squares += _finish(half_y, half_up, half_before, token, first + BLOCK_N, *places, T, N, GATED, HALF_N)
    if next_norm_ptr is not None:
        tl.store(next_squares_ptr + tile * T + token, own_squares, mask=token < T)


@triton.jit
def _product(x, weight_desc, first, start, y):
    return tl.dot(x, weight_desc.load([first, start]).T, y, input_precision="ieee")


@triton.jit
def _load_tile(ptr, token, first, T, N, BLOCK_N: tl.constexpr):
    output = first + tl.arange(0, BLOCK_N)
    inside = (token < T)[:, None] & (output < N)[None, :]
    return tl.load(ptr + token.to(tl.int64)[:, None] * N + output[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _finish(
    y,
    up,
    before,
    token,
    first,
    bias_ptr,
    out_ptr,
    next_norm_ptr,
    scaled_ptr,
    tap_ptr,
    tap_stride,
    T,
    N,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store outputs from `first` on, added to what was there `before`, and the start of the norm that comes next.
    Returns their sums of squares."""
    output = first + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = y * tl.sigmoid(y) * up
    place = token.to(tl.int64)[:, None] * N + output[None, :]
    inside = (token < T)[:, None] & (output < N)[None, :]
    rounded = (y + before).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, rounded, mask=inside)
    if tap_ptr is not None:
        tl.store(tap_ptr + token.to(tl.int64)[:, None] * tap_stride + output[None, :], rounded, mask=inside)
    wide = tl.where(inside, rounded.to(tl.float32), 0.0)
    if next_norm_ptr is not None:
        norm = tl.load(next_norm_ptr + output, mask=output < N, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * norm[None, :]).to(scaled_ptr.dtype.element_ty), mask=inside)
    return tl.sum(wide * wide, 1)
