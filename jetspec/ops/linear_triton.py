"""The Triton kernels of products with one row, and with a few: norm, gate and residual included.

A decode step reads each weight once, at the speed of the memory. Operations around a product cost nothing inside its
kernel, but a launch and a pause of the memory in kernels of their own.

The tiled kernels, of a few rows and of others, differ in how they load data, not in what they compute. A norm is spread
over two products, so that it needs no kernel of its own: the product that writes the residual stream scales it by the
norm's weight and sums the squares of its part of each row, and the product that reads it divides.

Layout: x (T, K), weight (N, K) or, gated, (2 N, K) with the gate first, out (T, N), all contiguous. Squares are
(parts, T) in fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetspec.ops.layouts import STAGE_BYTES, Residual, copied, is_small, new_rows, whole_tiles
from jetspec.ops.norm_rope import rms_norm
from jetspec.ops.overlap_triton import fetch, launch, wait
from jetspec.ops.select import device_of, enabled

BLOCK_K = 2048
PRODUCTS = 4096
"""Products that a program keeps apart, for one row."""
LONG_ROW = 8192
"""Inputs with which a single output is work enough for a program, which then reads twice as many at a time."""

WIDTHS = ((64, True), (64, False), (32, True), (32, False))
"""Outputs of a tile of a few rows, and whether half as many are added, from the widest to the narrowest."""


@dataclass(frozen=True)
class Epilogue:
    """Operations fused with a product y = x W^T, in order: divide, add the bias, gate, add to the residual stream."""

    bias: Tensor | None = None
    gated: bool = False
    """silu(gate) * up, where the weight holds the rows of the gate first."""
    squares: Tensor | None = None
    """(parts, T): sums of squares of the input rows, which are divided by their root mean square."""
    eps: float = 0.0
    total: Tensor | None = None
    """The residual stream (T, N)."""
    next_norm: Tensor | None = None
    scaled: Tensor | None = None
    """Output: the sum times `next_norm`."""
    next_squares: Tensor | None = None
    """Output: (programs, T) sums of squares of the sum."""
    tap: Tensor | None = None
    """A second output of the sum, whose rows may be far apart."""

    def operands(self, out: Tensor) -> tuple[Tensor | None, ...]:
        """Pointers of every kernel, in order."""
        read = self.bias, self.squares, self.total
        return *read, out, self.next_norm, self.scaled, self.next_squares, self.tap

    def numbers(self, out: Tensor) -> tuple[int | float, ...]:
        """T, N, num_parts, tap_stride, eps."""
        num_parts = 0 if self.squares is None else len(self.squares)
        return *out.shape, num_parts, 0 if self.tap is None else self.tap.stride(0), self.eps

    @property
    def parts(self) -> int:
        """Sums of squares per row, rounded up to a power of two."""
        return 1 if self.squares is None else triton.next_power_of_2(len(self.squares))


@dataclass(frozen=True)
class TiledLinear:
    """The products of a layer by one kernel, with the signatures of `linear.py`."""

    plan: Callable[[Tensor, Tensor, int, bool, bool], Any]
    """Returns block sizes for x, the weight, the number of outputs, a gate, an addition; `width` is the outputs of a
    program."""
    launch: Callable[[Any, Tensor, Tensor, Tensor, Epilogue], None]
    """Runs the kernel with tiles, x, the weight, the output and the epilogue."""

    def linear(self, x_TK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x_TK, weight, Epilogue(bias))

    def norm_linear(
        self, residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
    ) -> Tensor:
        x_TK = rms_norm(residual.x, norm, eps) if residual.scaled is None else residual.scaled
        return self._product(x_TK, weight, Epilogue(bias, gated, residual.squares, eps))

    def add_linear(
        self, total_TN: Tensor, x_TK: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor, tap: Tensor | None
    ) -> Residual:
        (T, N), tiles = total_TN.shape, self.plan(x_TK, weight, len(weight), False, True)
        scaled = new_rows(T, N, like=total_TN)
        squares = torch.empty((-(-N // tiles.width), T), dtype=torch.float32, device=total_TN.device)
        epilogue = Epilogue(bias, total=total_TN, next_norm=next_norm, scaled=scaled, next_squares=squares, tap=tap)
        self.launch(tiles, x_TK, weight, total_TN, epilogue)
        return Residual(total_TN, scaled, squares)

    def _product(self, x_TK: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
        N = len(weight) // (2 if epilogue.gated else 1)
        out = new_rows(len(x_TK), N, like=x_TK)
        self.launch(self.plan(x_TK, weight, N, epilogue.gated, False), x_TK, weight, out, epilogue)
        return out


def vector_norm_linear(
    residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:
    return vector_linear(residual.x, weight, bias, norm=norm, eps=eps, gated=gated)


def vector_add_linear(
    total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor | None, tap: Tensor | None
) -> Residual:
    return copied(Residual(vector_linear(x, weight, bias, total=total)), tap)


def vector_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    total: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    N, K = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    is_long = K >= LONG_ROW
    block_k = min(2 * BLOCK_K if is_long else BLOCK_K, triton.next_power_of_2(K))
    block_n = max(1, PRODUCTS // block_k // (2 if gated else 1))
    sizes = {"K": K, "GATED": gated, "BLOCK_N": block_n, "BLOCK_K": block_k}
    sizes["num_warps"] = 8 if is_long or norm is not None else 4
    total = None if total is None else total.contiguous()
    grid = (triton.cdiv(N, block_n),)
    launch(_vector_linear_kernel, grid, x.contiguous(), weight, bias, norm, total, out, N, eps, **sizes)
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
    """BLOCK_N outputs of one row. Products are summed at the end, so that only loads stand between two blocks of the
    weight. The norm divides by a number that is complete at the end, and is applied there.

    The weight is loaded one block ahead, and its first block while the previous kernel still runs.
    """
    # load the first weight block
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
    # prefetch the residual
    before = tl.zeros([BLOCK_N], tl.float32)
    if total_ptr is not None:
        before = tl.load(total_ptr + output, mask=inside, other=0.0).to(tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        # load the next weight block
        next_start = start + BLOCK_K
        next_weight = tl.load(row + next_start, mask=(next_start + lane < K)[None, :], other=0.0)
        next_up_weight = next_weight
        if GATED:
            next_up_weight = tl.load(up_row + next_start, mask=(next_start + lane < K)[None, :], other=0.0)
        # multiply
        x = tl.load(x_ptr + start + lane, mask=start + lane < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + start + lane, mask=start + lane < K, other=0.0).to(tl.float32)
        products += weight.to(tl.float32) * x[None, :]
        weight = next_weight
        if GATED:
            up_products += up_weight.to(tl.float32) * x[None, :]
            up_weight = next_up_weight

    # reduce, finish the norm
    y = tl.sum(products, 1)
    up = tl.sum(up_products, 1)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        y *= scale
        up *= scale
    # bias, gate, residual
    if bias_ptr is not None:
        y += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + output, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    tl.store(out_ptr + output, (y + before).to(out_ptr.dtype.element_ty), mask=inside)


class RowTiles(NamedTuple):
    """Block sizes for a few rows, and how to run them."""

    BLOCK_M: int
    BLOCK_N: int
    """Outputs. Each program reads all of x, so tiles are wide: about one program per multiprocessor."""
    HALF: bool
    """Adds half as many outputs, which fits the number of multiprocessors where powers of two do not."""
    BLOCK_K: int
    num_warps: int
    num_stages: int
    """Weight blocks in flight."""

    @property
    def width(self) -> int:
        return _width(self.BLOCK_N, self.HALF)


def _plan_rows(x_TK: Tensor, weight: Tensor, outputs: int, gated: bool, adds: bool) -> RowTiles:
    widths = [width for width in WIDTHS if not width[1] or enabled("linear.half_tiles", x_TK.device)]
    return choose_row_tiles(len(x_TK), outputs, gated, device_of(x_TK.device).multiprocessors, widths)


def _launch_rows(tiles: RowTiles, x_TK: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    (T, N), K = out.shape, x_TK.shape[1]
    x_desc = TensorDescriptor.from_tensor(whole_tiles(x_TK, tiles.BLOCK_M), [tiles.BLOCK_M, tiles.BLOCK_K])
    weight_desc = TensorDescriptor.from_tensor(weight, [tiles.BLOCK_N, tiles.BLOCK_K])
    half_desc = TensorDescriptor.from_tensor(weight, [tiles.BLOCK_N // 2, tiles.BLOCK_K]) if tiles.HALF else None
    operands = weight, x_desc, weight_desc, half_desc, epilogue.operands(out), K, epilogue.numbers(out)
    sizes = {"GATED": epilogue.gated, "PARTS": epilogue.parts, "EARLY": is_small(weight), **tiles._asdict()}
    launch(_rows_linear_kernel, (triton.cdiv(N, tiles.width), triton.cdiv(T, tiles.BLOCK_M)), *operands, **sizes)


ROWS = TiledLinear(_plan_rows, _launch_rows)


def _width(block_n: int, half: bool) -> int:
    return block_n + block_n // 2 if half else block_n


def choose_row_tiles(
    rows: int, outputs: int, gated: bool, multiprocessors: int, widths: Sequence[tuple[int, bool]] = WIDTHS
) -> RowTiles:
    """Tiles of a few rows. Up to 16 rows cost little to read: the wider of two tiles that keeps the memory busy. With
    more rows, the tiles with which a multiprocessor reads least of both factors: each tile reads x anew, and tiles
    beyond one per multiprocessor run later. A narrow weight takes 64 rows at once, with which the tensor cores' own
    queue (wgmma) has less latency."""
    enough = multiprocessors * 5 // 11  # that keep the memory busy: 60 of 132
    block_m = 16 if rows <= 16 and triton.cdiv(outputs, _width(*widths[-1])) >= enough else 64
    sides, row_tiles = 2 if gated else 1, triton.cdiv(rows, block_m)

    def programs(width: tuple[int, bool]) -> int:
        return triton.cdiv(outputs, _width(*width)) * row_tiles

    def rows_read(width: tuple[int, bool]) -> int:
        return triton.cdiv(programs(width), multiprocessors) * (block_m + sides * _width(*width))

    if block_m == 16:
        block_n, half = widths[0] if programs(widths[0]) >= enough else widths[-1]
    else:
        block_n, half = min(widths, key=rows_read)
    weight_rows = _width(block_n, half) * sides
    block_k = 256 if block_m == 16 else 128
    while (stages := STAGE_BYTES // ((block_m + weight_rows) * block_k * 2)) < 3:
        block_k //= 2
    return RowTiles(block_m, block_n, half, block_k, num_warps=4, num_stages=min(stages, 6))


@triton.jit
def _rows_linear_kernel(
    weight_ptr,
    x_desc,
    weight_desc,
    half_desc,
    operands,
    K,
    numbers,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr = False,
    OVERLAP: tl.constexpr = False,
):
    """A tile of BLOCK_M rows and BLOCK_N (+ HALF_N) outputs. A small weight is prefetched EARLY, while the previous
    kernel still runs."""
    bias_ptr, squares_ptr, total_ptr, out_ptr, next_norm_ptr, scaled_ptr, next_squares_ptr, tap_ptr = operands
    T, N, num_parts, tap_stride, eps = numbers
    HALF_N: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0)
    first = tile * (BLOCK_N + HALF_N if HALF else BLOCK_N)
    first_token = tl.program_id(1) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = y
    half_y = tl.zeros([BLOCK_M, HALF_N], tl.float32)
    half_up = half_y
    # prefetch a small weight into the L2 cache
    if EARLY and OVERLAP:
        row_bytes = K * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        own_bytes = tl.minimum(BLOCK_N + HALF_N if HALF else BLOCK_N, N - first) * row_bytes
        fetch(weight_ptr + first * K, own_bytes)
        if GATED:
            fetch(weight_ptr + (N + first) * K, own_bytes)
    wait(OVERLAP)
    # prefetch the operands of the epilogue
    if squares_ptr is not None:
        part = tl.arange(0, PARTS)
        known = (part < num_parts)[:, None] & (token < T)[None, :]
        squares = tl.load(squares_ptr + part[:, None] * T + token[None, :], mask=known, other=0.0)
    before, half_before = y, half_y
    if total_ptr is not None:
        before = _load_tile(total_ptr, token, first, T, N, BLOCK_N)
        if HALF:
            half_before = _load_tile(total_ptr, token, first + BLOCK_N, T, N, HALF_N)
    # load x and weight tiles, multiply
    for start in tl.range(0, K, BLOCK_K):
        x = x_desc.load([first_token, start])
        y = _product(x, weight_desc, first, start, y)
        if GATED:
            up = _product(x, weight_desc, N + first, start, up)
        if HALF:
            half_y = _product(x, half_desc, first + BLOCK_N, start, half_y)
            if GATED:
                half_up = _product(x, half_desc, N + first + BLOCK_N, start, half_up)

    # divide by the root mean square
    if squares_ptr is not None:
        divisor = tl.sqrt(tl.sum(squares, 0) / K + eps)[:, None]
        y /= divisor
        up /= divisor
        half_y /= divisor
        half_up /= divisor
    # bias, gate, residual; store
    places = bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride
    own_squares = _finish(y, up, before, token, first, places, T, N, GATED, BLOCK_N)
    if HALF:
        own_squares += _finish(half_y, half_up, half_before, token, first + BLOCK_N, places, T, N, GATED, HALF_N)
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
def _finish(y, up, before, token, first, places, T, N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores outputs from `first` on, added to the residual `before`, and begins the next norm. Returns the sums of
    squares of the stored rows."""
    bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride = places
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
