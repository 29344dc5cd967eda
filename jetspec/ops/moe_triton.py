"""The Triton kernels of `add_mixture`: group the tokens by expert, two grouped products, then the sum over choices.
Nothing asks the host.

A pair is a token and one of its choices, numbered token * choices + choice. A tile is some pairs of one expert,
filled up with the number of pairs, which stands for none. How many tiles there are depends on the router, so that as
many programs are launched as run side by side, and each goes from one piece of the work to the next. Kernels are
compiled for a few sizes of blocks, not for every number of tokens.

Experts are so many, and their pairs so few, that the time goes into reading weights: each is read once for all pairs
of a tile, and the tensor cores take it from where it was copied to, as the left factor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait
from jetspec.ops.rows import new_rows

GROUP_BLOCK = 1024
"""Pairs that are looked at together."""
ADD_BLOCK = 512
"""Columns of a token that a program adds up."""


class Tiling(NamedTuple):
    """Block sizes of the two products, and how to run them."""

    PAIRS: int
    """Of a tile: 16, 32 or 64. One that has half as many, or a quarter, is multiplied as such."""
    ROWS: int
    """Of a weight. Each program reads all of x for them."""
    DEPTH: int
    num_warps: int
    num_stages: int
    """Blocks on their way."""
    programs: int
    """Per multiprocessor."""


def add_mixture_triton(
    total_TM: Tensor,
    x_TM: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    next_norm: Tensor | None,
    tap: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Adds to `total_TM`, and copies the result to `tap`, whose rows may be far apart. Returns it scaled by the weight
    of a norm, and its sums of squares (parts, T), if there is one.

    Choices are added up in their order, whatever the other tokens chose.
    """
    if len(total_TM) == 0:
        return None, None
    out_TKM = _mix(x_TM.contiguous(), expert_TK, weight_TK.contiguous(), gate_up, down)
    T, K, M = out_TKM.shape
    parts = triton.cdiv(M, ADD_BLOCK)
    scaled = squares = None
    if next_norm is not None:
        scaled = new_rows(T, M, like=total_TM)
        squares = torch.empty((parts, T), dtype=torch.float32, device=total_TM.device)
    with torch.cuda.device_of(total_TM):
        _add_choices_kernel[(T, parts)](
            *(total_TM, out_TKM, next_norm, scaled, squares, tap),
            *(T, 0 if tap is None else tap.stride(0)),
            K=K,
            M=M,
            BLOCK=ADD_BLOCK,
            num_warps=2,
            **overlap(total_TM),
        )
    return scaled, squares


def _mix(x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """(T, K, M): what each choice contributes."""
    assert gate_up.is_contiguous() and down.is_contiguous()
    (T, K), (E, M, inner) = expert_TK.shape, down.shape
    num_pairs = expert_TK.numel()
    tiling = _choose_tiling(T, x_TM.itemsize)._asdict()
    programs = tiling.pop("programs") * _num_multiprocessors(x_TM.device)
    pair, tile_expert, num_tiles = group_pairs_triton(expert_TK, E, tiling["PAIRS"])
    groups = pair, tile_expert, num_tiles, num_pairs
    sizes = {"M": M, "INNER": inner, **tiling, **overlap(x_TM)}
    gated = torch.empty((num_pairs, inner), dtype=x_TM.dtype, device=x_TM.device)
    out_TKM = torch.empty((T, K, M), dtype=x_TM.dtype, device=x_TM.device)
    with torch.cuda.device_of(x_TM):
        pieces = len(tile_expert) * triton.cdiv(2 * inner, tiling["ROWS"])
        _gate_up_kernel[(min(pieces, programs),)](x_TM, gate_up, gated, *groups, K=K, **sizes)
        pieces = len(tile_expert) * triton.cdiv(M, tiling["ROWS"])
        _down_kernel[(min(pieces, programs),)](gated, down, weight_TK, out_TKM, *groups, **sizes)
    return out_TKM


def _choose_tiling(tokens: int, itemsize: int) -> Tiling:
    """An expert has as many pairs as there are tokens at most. Narrow pieces spread the few experts of a few tokens
    over all multiprocessors, wide ones save reading x for each anew. Without tensor cores, registers are short."""
    if itemsize > 2:
        return Tiling(64, 64, 32, num_warps=8, num_stages=3, programs=2)
    if tokens <= 4:
        return Tiling(16, 64, 128, num_warps=4, num_stages=4, programs=2)
    return Tiling(16 if tokens <= 16 else 64, 128, 64, num_warps=4, num_stages=4, programs=2)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """Where kernels are interpreted, few enough that programs have several pieces."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def group_pairs_triton(expert_TK: Tensor, num_experts: int, tile_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of each tile, one tile behind the other, the expert of each, and how many tiles there are (1,). Behind
    these is room for as many as there can be.

    Experts are in order, and so are the pairs of an expert. Each expert has one tile that is not full at most.
    """
    num_pairs = expert_TK.numel()
    tiles = min(num_experts, num_pairs) + num_pairs // tile_size
    pair = torch.empty(tiles * tile_size, dtype=torch.int32, device=expert_TK.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=expert_TK.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=expert_TK.device)
    with torch.cuda.device_of(expert_TK):
        _group_pairs_kernel[(num_experts,)](
            *(expert_TK.contiguous(), pair, tile_expert, num_tiles, num_pairs),
            TILE=tile_size,
            BINS=triton.next_power_of_2(num_experts),
            BLOCK=min(GROUP_BLOCK, max(128, triton.next_power_of_2(num_pairs))),
            **overlap(expert_TK),
        )
    return pair, tile_expert, num_tiles


@triton.jit(do_not_specialize=["num_pairs"])
def _group_pairs_kernel(
    expert_ptr,
    pair_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    num_pairs,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """A program fills the tiles of one expert. It counts all pairs, so as to know where those tiles begin."""
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BINS], tl.int32)
    wait(OVERLAP)
    for start in range(0, num_pairs, BLOCK):
        inside = start + lane < num_pairs
        expert = tl.load(expert_ptr + start + lane, mask=inside, other=0).to(tl.int32)
        count += tl.histogram(expert, BINS, mask=inside)

    tiles = (count + TILE - 1) // TILE
    bin = tl.arange(0, BINS)
    first = tl.sum(tl.where(bin < me, tiles, 0))
    end = first + tl.sum(tl.where(bin == me, tiles, 0))
    for tile in range(first, end):
        tl.store(tile_expert_ptr + tile, me)
    if me == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles))

    place = first * TILE
    for start in range(0, num_pairs, BLOCK):
        inside = start + lane < num_pairs
        mine = inside & (tl.load(expert_ptr + start + lane, mask=inside, other=0).to(tl.int32) == me)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(pair_ptr + place + rank - 1, start + lane, mask=mine)
        place += tl.sum(mine.to(tl.int32))
    rest = place + tl.arange(0, TILE)
    tl.store(pair_ptr + rest, tl.full([TILE], 0, tl.int32) + num_pairs, mask=rest < end * TILE)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    gated_ptr,
    pair_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    num_pairs,
    K: tl.constexpr,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """silu(gate x) * (up x) of every pair. A piece of work is a tile and some columns of both."""
    COLUMNS: tl.constexpr = ROWS // 2
    PIECES: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    wait(OVERLAP)
    for piece in range(tl.program_id(0), tl.load(num_tiles_ptr) * PIECES, tl.num_programs(0)):
        expert, tile_ptr, count = _open_tile(piece // PIECES, pair_ptr, tile_expert_ptr, num_pairs, PAIRS)
        weight_ptr = gate_up_ptr + expert * 2 * INNER * M
        places = x_ptr, weight_ptr, gated_ptr, tile_ptr, num_pairs, piece % PIECES * COLUMNS
        for bits in tl.static_range(4, 7):
            if _suits(count, 1 << bits, PAIRS):
                _gate_up(*places, K, M, INNER, 1 << bits, COLUMNS, DEPTH)


@triton.jit
def _gate_up(
    x_ptr,
    weight_ptr,
    gated_ptr,
    tile_ptr,
    num_pairs,
    first,
    K: tl.constexpr,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one expert, from column `first` on. The rows of the gate stand above those that it gates."""
    pair = tl.load(tile_ptr + tl.arange(0, PAIRS)).to(tl.int64)
    half, lane = tl.arange(0, 2 * COLUMNS) // COLUMNS, tl.arange(0, 2 * COLUMNS) % COLUMNS
    row, is_row, is_pair = half * INNER + first + lane, first + lane < INNER, pair < num_pairs
    y = _product(weight_ptr, row, is_row, x_ptr, pair // K, is_pair, M, DEPTH)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, COLUMNS, PAIRS]), [1, 2, 0]))
    column = first + tl.arange(0, COLUMNS)
    inside = (column < INNER)[:, None] & is_pair[None]
    tl.store(gated_ptr + pair[None] * INNER + column[:, None], gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    gated_ptr,
    down_ptr,
    weight_ptr,
    out_ptr,
    pair_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    num_pairs,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """weight * (down gated) of every pair. A piece of work is a tile and some columns."""
    PIECES: tl.constexpr = (M + ROWS - 1) // ROWS
    wait(OVERLAP)
    for piece in range(tl.program_id(0), tl.load(num_tiles_ptr) * PIECES, tl.num_programs(0)):
        expert, tile_ptr, count = _open_tile(piece // PIECES, pair_ptr, tile_expert_ptr, num_pairs, PAIRS)
        expert_ptr = down_ptr + expert * M * INNER
        places = gated_ptr, expert_ptr, weight_ptr, out_ptr, tile_ptr, num_pairs, piece % PIECES * ROWS
        for bits in tl.static_range(4, 7):
            if _suits(count, 1 << bits, PAIRS):
                _down(*places, M, INNER, 1 << bits, ROWS, DEPTH)


@triton.jit
def _down(
    gated_ptr,
    down_ptr,
    weight_ptr,
    out_ptr,
    tile_ptr,
    num_pairs,
    first,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one expert, from column `first` on."""
    pair = tl.load(tile_ptr + tl.arange(0, PAIRS)).to(tl.int64)
    is_pair = pair < num_pairs
    weight = tl.load(weight_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
    column = first + tl.arange(0, COLUMNS)
    y = _product(down_ptr, column, column < M, gated_ptr, pair, is_pair, INNER, DEPTH)
    inside = (column < M)[:, None] & is_pair[None]
    tl.store(out_ptr + pair[None] * M + column[:, None], y * weight[None], mask=inside)


@triton.jit
def _open_tile(tile, pair_ptr, tile_expert_ptr, num_pairs, PAIRS: tl.constexpr):
    """Its expert, where its pairs are, and how many."""
    tile_ptr = pair_ptr + tile * PAIRS
    count = tl.sum((tl.load(tile_ptr + tl.arange(0, PAIRS)) < num_pairs).to(tl.int32))
    return tl.load(tile_expert_ptr + tile).to(tl.int64), tile_ptr, count


@triton.jit
def _suits(count, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """Whether this is the least size that holds so many pairs."""
    if SIZE > PAIRS:
        return False
    return (count <= SIZE) & ((SIZE == 16) | (count > SIZE // 2))


@triton.jit
def _product(weight_ptr, row, is_row, x_ptr, x_row, is_x_row, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Rows of a weight by rows of x: (weight rows, x rows)."""
    depth = tl.arange(0, DEPTH)
    weight_ptrs = weight_ptr + row[:, None] * SIZE + depth[None]
    x_ptrs = x_ptr + x_row[:, None] * SIZE + depth[None]
    y = tl.zeros([row.shape[0], x_row.shape[0]], tl.float32)
    for start in range(0, SIZE, DEPTH):
        is_deep = (start + depth < SIZE)[None]
        weight = tl.load(weight_ptrs + start, mask=is_row[:, None] & is_deep, other=0.0)
        x = tl.load(x_ptrs + start, mask=is_x_row[:, None] & is_deep, other=0.0)
        y = tl.dot(weight, x.T, y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=["T"])
def _add_choices_kernel(
    total_ptr,
    choice_ptr,
    next_norm_ptr,
    scaled_ptr,
    squares_ptr,
    tap_ptr,
    T,
    tap_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Some columns of one token: what its experts made, added to what was there, and the start of the next norm."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < M
    if next_norm_ptr is not None:
        norm = tl.load(next_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait(OVERLAP)
    y = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        y += tl.load(choice_ptr + (token * K + choice) * M + column, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(total_ptr + token * M + column, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * M + column, rounded, mask=inside)
    if tap_ptr is not None:
        tl.store(tap_ptr + token * tap_stride + column, rounded, mask=inside)
    if next_norm_ptr is not None:
        wide = rounded.to(tl.float32)
        tl.store(scaled_ptr + token * M + column, wide * norm, mask=inside)
        tl.store(squares_ptr + part * T + token, tl.sum(wide * wide))
