"""Triton kernels of `shortlist`: the log-sum-exp of every parent, then the best log-probability of every token.

Products of a few parents with all successor vectors are bound by reading these vectors, so they are computed twice
rather than stored.

Layout, contiguous: logits are (B, D, V), parents (B, D, P), gates (B, D, R), predecessor and successor vectors (V, R).
The vocabulary is split into chunks of `span` tokens, and a chunk into tiles. The rows of a program are DEPTHS * PARENTS
pairs of a depth and a parent; index P is "no parent". Partial maxima and sums are (B, chunks, D, P + 1).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import fetch, overlap, wait
from jetspec.ops.topk_logprob import topk_logprob
from jetspec.types import EdgeFactors

PROGRAMS = 1024
"""Programs, approximately, for the vocabulary of all requests: enough to fill a GPU. Each loads the parents first, so
more would do so more often for less work."""
PARENT_BYTES, TILE_BYTES = 32 * 1024, 16 * 1024
"""Most shared memory for the parents and for a tile of successors, so that several programs fit on a multiprocessor."""
MAX_PARENTS, MAX_TOKENS = 64, 64
"""Most rows and most tokens of a product: it is held in registers."""
GATHER_BLOCK = 256
"""Shortlisted tokens per program of the last kernel."""

# Stands for no logit. Finite, since the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


def shortlist_triton(
    logits_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors, count: int, temperature_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_BDV = logits_BDV.contiguous()
    best_BDV, lse_BD = best_logprob_triton(logits_BDV, root_B, parents_BDP, edge, temperature_B)
    token_BDC = topk_logprob(best_BDV, count)[0]
    logprob_BDC = torch.empty_like(token_BDC, dtype=torch.float32)
    B, D, V = logits_BDV.shape
    with torch.cuda.device_of(logits_BDV):
        _gather_logprob_kernel[(B * D, triton.cdiv(count, GATHER_BLOCK))](
            *(logits_BDV, token_BDC, lse_BD, temperature_B, logprob_BDC, V, count, _stride(temperature_B)),
            D=D,
            BLOCK=GATHER_BLOCK,
            **overlap(logits_BDV),
        )
    return token_BDC, logprob_BDC


def best_logprob_triton(
    logits_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors, temperature_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the best log-probability of each token, (B, D, V), and the log-sum-exp without an edge, (B, D)."""
    (B, D, V), P, R = logits_BDV.shape, parents_BDP.shape[-1], edge.gate_BDR.shape[-1]
    ranks, parents = max(16, triton.next_power_of_2(R)), triton.next_power_of_2(P + 1)
    itemsize = edge.successor_VR.element_size()
    tile, depths = num_tokens(ranks, itemsize), num_depths(D, parents, ranks, itemsize)
    blocks = triton.cdiv(D, depths)
    span = triton.cdiv(triton.cdiv(V, tile) * blocks * B, PROGRAMS) * tile
    chunks = triton.cdiv(V, span)
    top_BCDQ = torch.empty(B, chunks, D, P + 1, dtype=torch.float32, device=logits_BDV.device)
    total_BCDQ, lse_QBD = torch.empty_like(top_BCDQ), top_BCDQ.new_empty(P + 1, B, D)
    best_BDV = top_BCDQ.new_empty(B, D, V)
    inputs = (
        *(logits_BDV, root_B.contiguous(), parents_BDP.contiguous(), temperature_B),
        *(edge.gate_BDR.contiguous(), edge.predecessor_VR.contiguous(), edge.successor_VR.contiguous()),
    )
    sizes = {"D": D, "P": P, "R": R, "RANKS": ranks, "DEPTHS": depths, "PARENTS": parents, "TILE": tile}
    sizes |= {"num_warps": num_warps(depths * parents), **overlap(logits_BDV)}
    stages = num_stages(ranks, itemsize)
    with torch.cuda.device_of(logits_BDV):
        _mass_kernel[(chunks, blocks, B)](
            *(*inputs, top_BCDQ, total_BCDQ, V, span, _stride(temperature_B)), num_stages=stages, **sizes
        )
        _sum_kernel[(P + 1, D, B)](
            *(top_BCDQ, total_BCDQ, lse_QBD, chunks), CHUNKS=triton.next_power_of_2(chunks), **overlap(logits_BDV)
        )
        _best_logprob_kernel[(chunks, blocks, B)](
            *(*inputs, lse_QBD, best_BDV, V, span, _stride(temperature_B)), num_stages=stages, **sizes
        )
    return best_BDV, lse_QBD[P]


def num_tokens(ranks: int, itemsize: int) -> int:
    """Return the tokens per tile."""
    return min(max(16, TILE_BYTES // (ranks * itemsize)), MAX_TOKENS)


def num_depths(D: int, parents: int, ranks: int, itemsize: int) -> int:
    """Return the depths per program: as many as fit, since every program reads all its tokens. At least two, for
    `_rows`."""
    rows = min(max(16, PARENT_BYTES // (ranks * itemsize)), MAX_PARENTS)
    return max(2, min(triton.cdiv(rows, parents), triton.next_power_of_2(D)))


def num_warps(rows: int) -> int:
    """Return the warps per program: on Hopper, four warps feed 64 rows to the tensor cores."""
    return 8 if rows >= 128 else 4


def num_stages(ranks: int, itemsize: int) -> int:
    """Return the tiles in flight. Bounded by the shared memory of the smallest GPUs, where fp32 numbers are split into
    several parts."""
    return 3 if ranks * itemsize <= 128 else 2 if itemsize == 2 else 1


def _stride(temperature_B: Tensor | None) -> int:
    """Return the stride between requests, 0 where they share one temperature."""
    return 0 if temperature_B is None else temperature_B.stride(0)


@triton.jit
def _mass_kernel(
    logits_ptr,
    root_ptr,
    parents_ptr,
    temperature_ptr,
    gate_ptr,
    predecessor_ptr,
    successor_ptr,
    top_ptr,
    total_ptr,
    V,
    span,
    temperature_stride,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    PARENTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Maximum logit and sum of exponentials relative to it, over one chunk of the vocabulary, for each row."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    depth, parent = _rows(DEPTHS, PARENTS)
    top = tl.full([DEPTHS * PARENTS], LOWEST, tl.float32)
    total = tl.zeros([DEPTHS * PARENTS], tl.float32)
    # prefetch successors, load parents
    _fetch_successors(successor_ptr, chunk * span, V, R, TILE, OVERLAP)
    wait(OVERLAP)
    gated = _gated((root_ptr, parents_ptr, gate_ptr, predecessor_ptr), row, depth, parent, D, P, R, RANKS)
    # online log-sum-exp over the tiles
    for start in range(chunk * span, tl.minimum(chunk * span + span, V), TILE):
        token = start + tl.arange(0, TILE)
        successor = _successors(successor_ptr, token, V, R, RANKS)
        z = _add_product(
            _logits(logits_ptr, temperature_ptr, temperature_stride, row, depth, token, V, D), gated, successor
        )
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp2(z * LOG2_E - (higher * LOG2_E)[:, None]), 1)
        top = higher
    # store partials
    out = ((row * tl.num_programs(0) + chunk) * D + depth) * (P + 1) + parent
    known = (depth < D) & (parent <= P)
    tl.store(top_ptr + out, top, mask=known)
    tl.store(total_ptr + out, total, mask=known)


@triton.jit
def _sum_kernel(top_ptr, total_ptr, lse_ptr, num_chunks, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr = False):
    """Log-sum-exp of one parent at one depth, from the partial sums of its chunks."""
    wait(OVERLAP)
    parent, depth, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Q, D, B = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    chunk = tl.arange(0, CHUNKS)
    place = ((row * num_chunks + chunk) * D + depth) * Q + parent
    top = tl.load(top_ptr + place, mask=chunk < num_chunks, other=LOWEST)
    total = tl.load(total_ptr + place, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    tl.store(lse_ptr + (parent * B + row) * D + depth, highest + tl.log(tl.sum(total * tl.exp(top - highest))))


@triton.jit
def _best_logprob_kernel(
    logits_ptr,
    root_ptr,
    parents_ptr,
    temperature_ptr,
    gate_ptr,
    predecessor_ptr,
    successor_ptr,
    lse_ptr,
    best_ptr,
    V,
    span,
    temperature_stride,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    PARENTS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Log-probability of each token of a chunk, maximized over the parents of a depth and no parent."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    depth, parent = _rows(DEPTHS, PARENTS)
    own_depth = tl.program_id(1) * DEPTHS + tl.arange(0, DEPTHS)
    # prefetch successors, load parents
    _fetch_successors(successor_ptr, chunk * span, V, R, TILE, OVERLAP)
    wait(OVERLAP)
    gated = _gated((root_ptr, parents_ptr, gate_ptr, predecessor_ptr), row, depth, parent, D, P, R, RANKS)
    lse = tl.load(lse_ptr + (tl.minimum(parent, P) * tl.num_programs(2) + row) * D + tl.minimum(depth, D - 1))
    for start in range(chunk * span, tl.minimum(chunk * span + span, V), TILE):
        token = start + tl.arange(0, TILE)
        successor = _successors(successor_ptr, token, V, R, RANKS)
        z = _add_product(
            _logits(logits_ptr, temperature_ptr, temperature_stride, row, depth, token, V, D), gated, successor
        )
        # maximize over the parents of each depth, in the order of `_rows`
        logprob = tl.reshape(z - lse[:, None], [DEPTHS // 2, 2, 2, PARENTS // 2, TILE])
        best = tl.reshape(tl.max(tl.max(logprob, 1), 2), [DEPTHS, TILE])
        place = (row * D + own_depth)[:, None] * V + token[None, :]
        tl.store(best_ptr + place, best, mask=(own_depth < D)[:, None] & (token < V)[None, :])


@triton.jit
def _gather_logprob_kernel(
    logits_ptr,
    token_ptr,
    lse_ptr,
    temperature_ptr,
    out_ptr,
    V,
    count,
    temperature_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Log-probabilities, without an edge, of the shortlisted tokens of one depth."""
    wait(OVERLAP)
    level = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + level * count + place, mask=place < count, other=0)
    logit = tl.load(logits_ptr + level * V + token, mask=place < count, other=0.0).to(tl.float32)
    if temperature_ptr is not None:
        logit /= tl.load(temperature_ptr + level // D * temperature_stride)
    tl.store(out_ptr + level * count + place, logit - tl.load(lse_ptr + level), mask=place < count)


@triton.jit
def _rows(DEPTHS: tl.constexpr, PARENTS: tl.constexpr):
    """Return the depth and the parent of every row of a program. Parents from P on are "no parent".

    Two depths share a group of rows, each with half of its parents in the first half and the rest in the second. Tensor
    cores give rows i and i + 8 of 16 to the same thread, which then holds two parents of one depth and compares them
    without an exchange.
    """
    index = tl.arange(0, DEPTHS * PARENTS)
    half: tl.constexpr = PARENTS // 2
    low, high = index % PARENTS, index // PARENTS % 2
    depth = index // (2 * PARENTS) * 2 + low // half
    return tl.program_id(1) * DEPTHS + depth, high * half + low % half


@triton.jit
def _logits(logits_ptr, temperature_ptr, temperature_stride, row, depth, token, V, D: tl.constexpr):
    """Return the logits of a tile of tokens for every row, -inf past the end of the vocabulary."""
    place = (row * D + tl.minimum(depth, D - 1))[:, None] * V + token[None, :]
    inside = tl.broadcast_to((token < V)[None, :], place.shape)
    logit = tl.load(logits_ptr + place, mask=inside, other=-float("inf")).to(tl.float32)
    if temperature_ptr is not None:
        logit *= 1 / tl.load(temperature_ptr + row * temperature_stride)
    return logit


@triton.jit
def _fetch_successors(successor_ptr, start, V, R: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Prefetch the vectors of the program's first tile, which the preceding kernel does not write."""
    if OVERLAP and R % 8 == 0:
        own_bytes = tl.minimum(TILE, V - start) * R * (successor_ptr.dtype.element_ty.primitive_bitwidth // 8)
        fetch(successor_ptr + start.to(tl.int64) * R, own_bytes)


@triton.jit
def _successors(successor_ptr, token, V, R: tl.constexpr, RANKS: tl.constexpr):
    """Return the successor vectors of a tile of tokens, (RANKS, TILE)."""
    rank = tl.arange(0, RANKS)
    place = tl.minimum(token, V - 1).to(tl.int64)[None, :] * R + rank[:, None]
    return tl.load(successor_ptr + place, mask=(rank < R)[:, None], other=0.0)


@triton.jit
def _gated(places, row, depth, parent, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr):
    """Return the gated predecessor vectors of the rows: of the root at depth 0, else of the parent; 0 for none."""
    root_ptr, parents_ptr, gate_ptr, predecessor_ptr = places
    level = row * D + tl.minimum(depth, D - 1)
    previous = tl.load(parents_ptr + tl.maximum(level - 1, 0) * P + tl.minimum(parent, P - 1))
    token = tl.where(depth == 0, tl.load(root_ptr + row), previous)
    rank = tl.arange(0, RANKS)[None, :]
    inside = (parent < P)[:, None] & (rank < R)
    gate = tl.load(gate_ptr + level[:, None] * R + rank, mask=inside, other=0.0).to(tl.float32)
    vector = tl.load(predecessor_ptr + token.to(tl.int64)[:, None] * R + rank, mask=inside, other=0.0)
    return (vector.to(tl.float32) * gate).to(predecessor_ptr.dtype.element_ty)


@triton.jit
def _add_product(logits, gated, successor):
    """Add a product to logits on tensor cores; of fp32 factors with nearly fp32 precision."""
    return tl.dot(gated, successor, logits, input_precision="tf32x3")
