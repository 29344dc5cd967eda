"""The Triton kernels of `mixture`: group the tokens by expert, then two grouped products. Nothing asks the host.

A pair is a token and one of its choices, numbered token * choices + choice. A tile is some pairs of one expert,
filled up with the number of pairs, which stands for none. How many tiles there are depends on the router, so that
as many are launched as there can be, and those without an expert have nothing to do. No kernel is compiled anew for
another number of tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_BLOCK = 1024


@dataclass(frozen=True)
class Blocks:
    """What a program of a product works on: `pairs` rows of a tile, `out` columns, `depth` of the sum at a time."""

    pairs: int
    out: int
    depth: int
    num_warps: int
    num_stages: int


# Few pairs per expert: the time goes into reading weights, so many programs with several loads in flight each.
FEW = Blocks(pairs=16, out=32, depth=128, num_warps=4, num_stages=4)
MANY = Blocks(pairs=64, out=64, depth=64, num_warps=4, num_stages=3)


def mixture_triton(x_TM: Tensor, gate_up: Tensor, down: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Choices are added up in their order, whatever the other tokens chose."""
    assert gate_up.is_contiguous() and down.is_contiguous()
    T, K = expert_TK.shape
    M, inner = down.shape[1:]
    if T == 0:
        return torch.empty_like(x_TM)
    num_pairs = expert_TK.numel()
    blocks = MANY if num_pairs > FEW.pairs * len(down) else FEW
    pair, tile_expert = group_pairs_triton(expert_TK, len(down), blocks.pairs)
    tiles = len(tile_expert)
    shared = {
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "DEPTH": blocks.depth,
        "PAIRS": blocks.pairs,
    }

    gated = torch.empty((num_pairs, inner), dtype=x_TM.dtype, device=x_TM.device)
    grid = (tiles, triton.cdiv(inner, blocks.out))
    _gate_up_kernel[grid](
        x_TM.contiguous(), gate_up, gated, pair, tile_expert, num_pairs, K=K, M=M, INNER=inner, OUT=blocks.out, **shared
    )

    # A program reads as many rows of `down` as it read of gate and up together.
    out_TKM = torch.empty((T, K, M), dtype=x_TM.dtype, device=x_TM.device)
    grid = (tiles, triton.cdiv(M, 2 * blocks.out))
    _down_kernel[grid](
        gated,
        down,
        weight_TK.contiguous(),
        out_TKM,
        pair,
        tile_expert,
        num_pairs,
        M=M,
        INNER=inner,
        OUT=2 * blocks.out,
        **shared,
    )
    return out_TKM.sum(1)


def group_pairs_triton(expert_TK: Tensor, num_experts: int, tile_size: int) -> tuple[Tensor, Tensor]:
    """The pairs of each tile, one tile behind the other, and the expert of each tile, or -1.

    Experts are in order, and so are the pairs of an expert. Each expert has one tile that is not full at most.
    """
    num_pairs = expert_TK.numel()
    tiles = min(num_experts, num_pairs) + num_pairs // tile_size
    pair = torch.empty(tiles * tile_size, dtype=torch.int32, device=expert_TK.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=expert_TK.device)
    _group_pairs_kernel[(num_experts,)](
        expert_TK.contiguous(),
        pair,
        tile_expert,
        num_pairs,
        tiles,
        TILE=tile_size,
        BINS=triton.next_power_of_2(num_experts),
        BLOCK=GROUP_BLOCK,
    )
    return pair, tile_expert


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_pairs_kernel(
    expert_ptr,
    pair_ptr,
    tile_expert_ptr,
    num_pairs,
    num_tiles,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program fills the tiles of one expert. It counts all pairs, so as to know where those tiles begin."""
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BINS], tl.int32)
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
        for tile in range(tl.sum(tiles), num_tiles):
            tl.store(tile_expert_ptr + tile, -1)

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
    num_pairs,
    K: tl.constexpr,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """silu(gate x) * (up x) of a tile's pairs, for some columns of both."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    depth = tl.arange(0, DEPTH)
    is_pair, is_column = (pair < num_pairs)[:, None], column < INNER
    x_ptrs = x_ptr + (pair // K)[:, None] * M + depth[None]
    gate_ptrs = gate_up_ptr + expert * 2 * INNER * M + column[:, None] * M + depth[None]
    gate = tl.zeros([PAIRS, OUT], tl.float32)
    up = tl.zeros([PAIRS, OUT], tl.float32)
    for start in range(0, M, DEPTH):
        is_deep = (start + depth < M)[None]
        x = tl.load(x_ptrs + start, mask=is_pair & is_deep, other=0.0)
        gate_weight = tl.load(gate_ptrs + start, mask=is_column[:, None] & is_deep, other=0.0)
        up_weight = tl.load(gate_ptrs + INNER * M + start, mask=is_column[:, None] & is_deep, other=0.0)
        gate = tl.dot(x, gate_weight.T, gate, input_precision="ieee")
        up = tl.dot(x, up_weight.T, up, input_precision="ieee")
    out_ptrs = gated_ptr + pair[:, None] * INNER + column[None]
    tl.store(out_ptrs, gate * tl.sigmoid(gate) * up, mask=is_pair & is_column[None])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    gated_ptr,
    down_ptr,
    weight_ptr,
    out_ptr,
    pair_ptr,
    tile_expert_ptr,
    num_pairs,
    M: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """weight * (down gated) of a tile's pairs, for some columns."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    depth = tl.arange(0, DEPTH)
    is_pair, is_column = (pair < num_pairs)[:, None], column < M
    gated_ptrs = gated_ptr + pair[:, None] * INNER + depth[None]
    down_ptrs = down_ptr + expert * M * INNER + column[:, None] * INNER + depth[None]
    out = tl.zeros([PAIRS, OUT], tl.float32)
    for start in range(0, INNER, DEPTH):
        is_deep = (start + depth < INNER)[None]
        gated = tl.load(gated_ptrs + start, mask=is_pair & is_deep, other=0.0)
        down_weight = tl.load(down_ptrs + start, mask=is_column[:, None] & is_deep, other=0.0)
        out = tl.dot(gated, down_weight.T, out, input_precision="ieee")
    weight = tl.load(weight_ptr + pair, mask=pair < num_pairs, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + pair[:, None] * M + column[None]
    tl.store(out_ptrs, out * weight[:, None], mask=is_pair & is_column[None])
