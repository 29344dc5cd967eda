"""The Triton kernels of a mixture of experts.

`route` takes one program per row. The rank of an expert is the number of better experts: no sort, only a table of all
pairs, a few experts at a time. `add_mixture` groups the tokens by expert, computes two grouped products, then the sum
over choices, without a host sync.

A pair is a token and one of its choices, numbered token * choices + choice. A tile is some pairs of one expert, padded
with the number of pairs, which stands for none. The number of tiles depends on the router, so kernels are persistent:
as many programs run as fit on the GPU, and each takes one piece of work after the other. Kernels are compiled for a few
block sizes, not for every number of tokens.

With many experts and few pairs each, the time goes into reading weights. Each is read once for all pairs of a tile, and
is the left factor, which tensor cores take from shared memory.

Layout: logits (T, E), total and x (T, M), expert and weight (T, K), gate_up (E, 2 I, M) with the gate first, down
(E, M, I), gated (T K, I), out (T, K, M), all contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import Residual, Routed
from jetspec.ops.overlap_triton import launch, wait
from jetspec.ops.select import device_of

RANK_TABLE = 128 * 128
"""Pairs of experts that are compared at once."""
GROUP_BLOCK = 1024
"""Pairs that are counted at once."""
ADD_BLOCK = 512
"""Columns of a token that a program sums."""


class Tiling(NamedTuple):
    """Block sizes of the two products, and how to run them."""

    PAIRS: int
    """Pairs of a tile: 16, 32 or 64. A tile with half as many, or a quarter, is multiplied as a smaller one."""
    ROWS: int
    """Rows of a weight. Each program reads all of x for them."""
    DEPTH: int
    num_warps: int
    num_stages: int
    """Blocks in flight."""
    programs: int
    """Programs per multiprocessor."""


def route_triton(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (T, E), device = logits_TE.shape, logits_TE.device
    expert_TK = torch.empty((T, num_chosen), dtype=torch.int64, device=device)
    weight_TK = torch.empty((T, num_chosen), dtype=dtype, device=device)
    if T == 0:
        return expert_TK, weight_TK
    experts = triton.next_power_of_2(E)
    sizes = {"E": E, "CHOSEN": num_chosen, "NORMALIZE": normalize, "EXPERTS": experts}
    sizes |= {"OTHERS": min(experts, RANK_TABLE // experts), "num_warps": 4 if E <= 128 else 8}
    launch(_route_kernel, (T,), logits_TE.contiguous(), expert_TK, weight_TK, **sizes)
    return expert_TK, weight_TK


@triton.jit
def _route_kernel(
    logits_ptr,
    expert_ptr,
    weight_ptr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """The choices of one row. NaN counts as the worst logit, so that every rank is taken."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < E
    wait(OVERLAP)
    # load logits
    logit = tl.load(logits_ptr + token * E + expert, mask=is_expert, other=0.0).to(tl.float32)
    # rank experts, ties by index
    worth = tl.where(is_expert & (logit == logit), logit, -float("inf"))
    rank = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, EXPERTS, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_worth = tl.gather(worth, other, 0)[:, None]
        before = (other_worth == worth[None]) & (other[:, None] < expert[None])
        rank += tl.sum(((other_worth > worth[None]) | before).to(tl.int32), 0)
    # softmax over all experts, or over the chosen
    chance = tl.where(is_expert, tl.exp(logit - tl.max(worth)), 0.0)
    is_chosen = rank < CHOSEN
    weight = chance / tl.sum(tl.where(is_chosen, chance, 0.0) if NORMALIZE else chance)
    # store the chosen experts by rank
    place = token * CHOSEN + rank
    tl.store(expert_ptr + place, expert, mask=is_chosen)
    tl.store(weight_ptr + place, weight, mask=is_chosen)


def add_mixture_triton(total_TM: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, tap: Tensor | None) -> Residual:
    """Adds to `total_TM`, and copies the result to `tap`, whose rows may be far apart. Choices are added in order of
    rank, so the result of a token does not depend on other tokens."""
    if len(total_TM) == 0:
        return Residual(total_TM)
    out_TKM = _mix(routed.x_TM.contiguous(), routed.expert_TK, routed.weight_TK.contiguous(), gate_up, down)
    T, K, M = out_TKM.shape
    tap_stride = 0 if tap is None else tap.stride(0)
    grid, sizes = (T, triton.cdiv(M, ADD_BLOCK)), {"K": K, "M": M, "BLOCK": ADD_BLOCK, "num_warps": 2}
    launch(_add_choices_kernel, grid, total_TM, out_TKM, tap, tap_stride, **sizes)
    return Residual(total_TM)


def _mix(x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The contribution of each choice, (T, K, M)."""
    assert gate_up.is_contiguous() and down.is_contiguous()
    (T, K), (E, M, inner) = expert_TK.shape, down.shape
    num_pairs = expert_TK.numel()
    tiling = _choose_tiling(T, x_TM.itemsize)._asdict()
    programs = tiling.pop("programs") * device_of(x_TM.device).multiprocessors
    pair, tile_expert, num_tiles = group_pairs_triton(expert_TK, E, tiling["PAIRS"])
    groups = pair, tile_expert, num_tiles, num_pairs
    sizes = {"K": K, "M": M, "INNER": inner, **tiling}
    gated, out_TKM = x_TM.new_empty(num_pairs, inner), x_TM.new_empty(T, K, M)
    for size, operands in (
        (2 * inner, (x_TM, gate_up, None, gated)),
        (M, (gated, down, weight_TK, out_TKM)),
    ):
        pieces = len(tile_expert) * triton.cdiv(size, tiling["ROWS"])
        launch(_product_kernel, (min(pieces, programs),), *operands, *groups, **sizes)
    return out_TKM


def _choose_tiling(tokens: int, itemsize: int) -> Tiling:
    """An expert has at most as many pairs as there are tokens. Narrow pieces spread the few experts of a few tokens
    over all multiprocessors; wide ones read x less often. Without tensor cores, registers are short."""
    if itemsize > 2:
        return Tiling(64, 64, 32, num_warps=8, num_stages=3, programs=2)
    if tokens <= 4:
        return Tiling(16, 64, 128, num_warps=4, num_stages=4, programs=2)
    return Tiling(16 if tokens <= 16 else 64, 128, 64, num_warps=4, num_stages=4, programs=2)


def group_pairs_triton(expert_TK: Tensor, num_experts: int, tile_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pairs of each tile, the expert of each tile, and the number of tiles (1,). Outputs are allocated for
    the largest possible number.

    Experts are in order, and so are the pairs of an expert. At most one tile of an expert is not full.
    """
    num_pairs = expert_TK.numel()
    tiles = min(num_experts, num_pairs) + num_pairs // tile_size
    pair = torch.empty(tiles * tile_size, dtype=torch.int32, device=expert_TK.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=expert_TK.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=expert_TK.device)
    sizes = {"TILE": tile_size, "BINS": triton.next_power_of_2(num_experts)}
    sizes["BLOCK"] = min(GROUP_BLOCK, max(128, triton.next_power_of_2(num_pairs)))
    tensors = expert_TK.contiguous(), pair, tile_expert, num_tiles
    launch(_group_pairs_kernel, (num_experts,), *tensors, num_pairs, **sizes)
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
    """Fills the tiles of one expert. Every program counts the pairs of all experts: their sum is its first tile."""
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BINS], tl.int32)
    wait(OVERLAP)
    # count the pairs of every expert
    for start in range(0, num_pairs, BLOCK):
        inside = start + lane < num_pairs
        expert = tl.load(expert_ptr + start + lane, mask=inside, other=0).to(tl.int32)
        count += tl.histogram(expert, BINS, mask=inside)

    # store the expert of each tile
    tiles = (count + TILE - 1) // TILE
    bin = tl.arange(0, BINS)
    first = tl.sum(tl.where(bin < me, tiles, 0))
    end = first + tl.sum(tl.where(bin == me, tiles, 0))
    for tile in range(first, end):
        tl.store(tile_expert_ptr + tile, me)
    if me == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles))

    # store the pairs of the expert, then padding
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
def _product_kernel(
    x_ptr,
    weight_ptr,
    share_ptr,
    out_ptr,
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
    """silu(gate x) * (up x) of every pair or, with shares, share * (down x). A piece of work is a tile and some columns
    of gate and up, or of down."""
    SIZE: tl.constexpr = INNER if share_ptr is None else M
    COLUMNS: tl.constexpr = ROWS // 2 if share_ptr is None else ROWS
    PIECES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    wait(OVERLAP)
    for piece in range(tl.program_id(0), tl.load(num_tiles_ptr) * PIECES, tl.num_programs(0)):
        expert, tile_ptr, count = _open_tile(piece // PIECES, pair_ptr, tile_expert_ptr, num_pairs, PAIRS)
        if share_ptr is None:
            expert_ptr = weight_ptr + expert * 2 * INNER * M
            places = x_ptr, expert_ptr, out_ptr, tile_ptr, num_pairs, piece % PIECES * COLUMNS, K
        else:
            expert_ptr = weight_ptr + expert * M * INNER
            places = x_ptr, expert_ptr, share_ptr, out_ptr, tile_ptr, num_pairs, piece % PIECES * COLUMNS
        for bits in tl.static_range(4, 7):
            if _suits(count, 1 << bits, PAIRS):
                if share_ptr is None:
                    _gate_up(places, M, INNER, 1 << bits, COLUMNS, DEPTH)
                else:
                    _down(places, M, INNER, 1 << bits, COLUMNS, DEPTH)


@triton.jit
def _gate_up(
    places, M: tl.constexpr, INNER: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """One piece, from column `first` on. The weight rows of the gate are above those of up."""
    x_ptr, weight_ptr, gated_ptr, tile_ptr, num_pairs, first, K = places
    pair = tl.load(tile_ptr + tl.arange(0, PAIRS)).to(tl.int64)
    half, lane = tl.arange(0, 2 * COLUMNS) // COLUMNS, tl.arange(0, 2 * COLUMNS) % COLUMNS
    row, is_row, is_pair = half * INNER + first + lane, first + lane < INNER, pair < num_pairs
    y = _product(weight_ptr, row, is_row, x_ptr, pair // K, is_pair, M, DEPTH)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, COLUMNS, PAIRS]), [1, 2, 0]))
    column = first + tl.arange(0, COLUMNS)
    inside = (column < INNER)[:, None] & is_pair[None]
    tl.store(gated_ptr + pair[None] * INNER + column[:, None], gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _down(
    places, M: tl.constexpr, INNER: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """One piece, from column `first` on."""
    gated_ptr, down_ptr, share_ptr, out_ptr, tile_ptr, num_pairs, first = places
    pair = tl.load(tile_ptr + tl.arange(0, PAIRS)).to(tl.int64)
    is_pair = pair < num_pairs
    share = tl.load(share_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
    column = first + tl.arange(0, COLUMNS)
    y = _product(down_ptr, column, column < M, gated_ptr, pair, is_pair, INNER, DEPTH)
    inside = (column < M)[:, None] & is_pair[None]
    tl.store(out_ptr + pair[None] * M + column[:, None], y * share[None], mask=inside)


@triton.jit
def _open_tile(tile, pair_ptr, tile_expert_ptr, num_pairs, PAIRS: tl.constexpr):
    """The expert of a tile, the address of its pairs, and their number."""
    tile_ptr = pair_ptr + tile * PAIRS
    count = tl.sum((tl.load(tile_ptr + tl.arange(0, PAIRS)) < num_pairs).to(tl.int32))
    return tl.load(tile_expert_ptr + tile).to(tl.int64), tile_ptr, count


@triton.jit
def _suits(count, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """True for the smallest block size that holds so many pairs."""
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


@triton.jit
def _add_choices_kernel(
    total_ptr,
    choice_ptr,
    tap_ptr,
    tap_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Some columns of one token: adds the outputs of its experts to the residual."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < M
    wait(OVERLAP)
    y = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        y += tl.load(choice_ptr + (token * K + choice) * M + column, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(total_ptr + token * M + column, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * M + column, rounded, mask=inside)
    if tap_ptr is not None:
        tl.store(tap_ptr + token * tap_stride + column, rounded, mask=inside)
