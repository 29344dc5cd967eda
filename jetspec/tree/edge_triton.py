"""Triton kernel of `Candidates.children`: the shortlist of a depth, ranked for every possible parent.

Layout, contiguous: tokens and log-probabilities of the shortlists are (B, D, C), gates (B, D, R), predecessor and
successor vectors (V, R), outputs (B, D, C, K).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import launch
from jetspec.tree.draft_tree import Candidates

FEW_PARENTS = 16 * 512
"""512 programs of 16 parents each run at once on a large GPU."""
CHILDREN_BYTES = 64 * 1024
"""Most shared memory for the successor vectors of a tile."""

# Stands for no logit. Finite, since the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)


class Tiling(NamedTuple):
    """Sizes of the product of one program: parents x ranks times ranks x children."""

    PARENTS: int
    CHILDREN: int
    RANKS: int


def edge_children_triton(
    anchor_B: Tensor, candidates: Candidates, width: int, max_depth: int, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Return indices into the shortlist and log-probabilities of the K best children of every possible parent, (B, D,
    C, K) each.

    Row c of depth d belongs to the parent that is token c of the shortlist of depth d - 1; depth 1 has one row, for the
    anchor.
    """
    B, D, C = candidates.token_BDC.shape
    edge = candidates.edge
    assert edge is not None
    R = edge.gate_BDR.shape[-1]
    tiling = tiling or find_tiling(R, edge.successor_VR.dtype, B * max_depth * C)
    index_BDCK = torch.empty(B, D, C, width, dtype=torch.int32, device=anchor_B.device)
    logprob_BDCK = torch.empty_like(index_BDCK, dtype=torch.float32)
    factors = edge.gate_BDR, edge.predecessor_VR, edge.successor_VR
    inputs = [x.contiguous() for x in (candidates.token_BDC, candidates.logprob_BDC, *factors)]
    sizes = {"R": R, "WIDTH": triton.next_power_of_2(width), **tiling._asdict()}
    grid = -(-C // tiling.PARENTS), max_depth, B
    launch(_edge_children_kernel, grid, anchor_B, *inputs, index_BDCK, logprob_BDCK, D, C, width, **sizes)
    return index_BDCK, logprob_BDCK


def find_tiling(rank: int, dtype: torch.dtype, parents: int) -> Tiling:
    """Return the tiling. The whole rank is one tile where 100 KB of shared memory suffice: parents are then read and
    gated only once.

    Few parents: latency counts, so every program takes 16 of them and as many children at once as possible. Many
    parents: tiles of 64 re-read the children less often. Each warp has 16 of the rows, so that the best child of a
    parent needs no exchange between warps.
    """
    ranks = max(16, triton.next_power_of_2(rank))
    if dtype != torch.bfloat16:
        return Tiling(64, 64, min(ranks, 32))
    if ranks <= 256 and parents <= FEW_PARENTS:
        return Tiling(16, min(256, CHILDREN_BYTES // (2 * ranks)), ranks)
    return Tiling(64, 64, ranks if ranks <= 256 else 64)


@triton.jit
def _edge_children_kernel(
    anchor_ptr,
    token_ptr,
    logprob_ptr,
    gate_ptr,
    predecessor_ptr,
    successor_ptr,
    index_ptr,
    out_ptr,
    D,
    C,
    K,
    R: tl.constexpr,
    PARENTS: tl.constexpr,
    CHILDREN: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rank one shortlist for a tile of parents, a tile of children at a time, keeping the K best per parent."""
    # load parents
    depth = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    level = row * D + depth  # index of the children's shortlist in (B, D)
    token_ptr += level * C
    logprob_ptr += level * C
    parent = tl.program_id(0) * PARENTS + tl.arange(0, PARENTS)
    num_parents = tl.where(depth == 0, 1, C)
    if tl.program_id(0) * PARENTS >= num_parents:
        return
    if depth == 0:
        parent_token = tl.load(anchor_ptr + row + tl.zeros_like(parent))
    else:
        parent_token = tl.load(token_ptr - C + parent, mask=parent < C, other=0)

    # Logits of the best children so far and their indices in the shortlist, in any order. Initially none, with distinct
    # indices past the end. Slots from K on are padding: +inf, so that no child replaces them.
    slot = tl.zeros([PARENTS, WIDTH], tl.int32) + tl.arange(0, WIDTH)[None, :]
    value = tl.where(slot < K, -float("inf"), float("inf"))
    place = C + slot
    top, total = tl.full([PARENTS], LOWEST, tl.float32), tl.zeros([PARENTS], tl.float32)
    base_top, base_total = tl.full([1], LOWEST, tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, C, CHILDREN):
        # load children
        child = start + tl.arange(0, CHILDREN)
        token = tl.load(token_ptr + child, mask=child < C, other=0)
        logprob = tl.load(logprob_ptr + child, mask=child < C, other=-float("inf"))[None, :]
        # scores
        z = tl.zeros([PARENTS, CHILDREN], tl.float32)
        for first in range(0, R, RANKS):
            r = first + tl.arange(0, RANKS)
            gate = tl.load(gate_ptr + level * R + r, mask=r < R, other=0.0).to(tl.float32)
            e1 = tl.load(predecessor_ptr + parent_token[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0.0)
            e2 = tl.load(successor_ptr + token[None, :] * R + r[:, None], mask=(r < R)[:, None], other=0.0)
            z = _add_product(z, e1.to(tl.float32) * gate[None, :], e2)
        z += logprob
        # online log-sum-exp, and the K best
        best = tl.max(z, axis=1)
        top, total = _add_exp(top, total, z, best)
        base_top, base_total = _add_exp(base_top, base_total, logprob, tl.max(logprob, axis=1))
        value, place = _keep_best(value, place, z, child, best)

    # sort the K best and store them
    mass = _log_sum(top, total) - _log_sum(base_top, base_total)
    value = tl.where(slot < K, value, -float("inf"))
    out = (level * C + parent) * K
    for k in range(K):
        best = tl.max(value, axis=1)
        first = tl.min(tl.where(value == best[:, None], place, 2 * C), axis=1)
        value = tl.where(place == first[:, None], -float("inf"), value)
        tl.store(index_ptr + out + k, tl.minimum(first, C - 1), mask=parent < num_parents)
        tl.store(out_ptr + out + k, best - mass, mask=parent < num_parents)


@triton.jit
def _add_product(z, gated, e2):
    """Near-fp32 product on tensor cores. A bf16 factor stays as it is; the other is split into two bf16 parts."""
    if e2.dtype == tl.bfloat16:
        coarse = gated.to(tl.bfloat16)
        fine = (gated - coarse.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(coarse, e2, tl.dot(fine, e2, z))
    else:
        return tl.dot(gated, e2.to(tl.float32), z, input_precision="tf32x3")


@triton.jit
def _keep_best(value, place, z, child, best):
    """Replace the worst kept child of a row by its best new child while that is better. Of equals the earlier wins."""
    worst = tl.min(value, axis=1)
    better = best > worst
    while tl.max(better.to(tl.int32)) > 0:
        equal = tl.where(z == best[:, None], child[None, :], 0x7FFFFFFF)
        first = tl.min(equal, axis=1)
        z = tl.where(equal == first[:, None], -float("inf"), z)
        last = tl.max(tl.where(value == worst[:, None], place, -1), axis=1)
        leaves = better[:, None] & (place == last[:, None])
        value = tl.where(leaves, best[:, None], value)
        place = tl.where(leaves, first[:, None], place)
        best, worst = tl.max(z, axis=1), tl.min(value, axis=1)
        better = best > worst
    return value, place


@triton.jit
def _add_exp(top, total, x, best):
    """Add rows to online sums of exp(x - top), where `top` is the maximum so far and `best` that of each new row."""
    higher = tl.maximum(top, best)
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)


@triton.jit
def _log_sum(top, total):
    """Return the log-sum-exp. Rows of -inf alone give a very low finite number, so that differences stay finite."""
    return top + tl.log(tl.maximum(total, 1e-30))
