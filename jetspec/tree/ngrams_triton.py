"""Triton kernels of `ngrams`, one program per request.

Layout, contiguous: texts (R, T) int32, counts (R, 2, lengths, buckets); tokens and rates of chains (B, K, D), lengths
of matches (B, K). A head's tree has N nodes, its union with the chains M = N + K D: node N + k D + d is token d of
chain k.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import launch
from jetspec.tree import ngrams
from jetspec.tree.build_triton import NODES, ancestor_kernel
from jetspec.tree.draft_tree import WORD, Acceptance, DraftTree
from jetspec.tree.ngrams import MATCHES, MAX_CHAIN, Matches, NgramTable

BLOCK = 2048
"""Positions of a text per step."""
TILE = 16
"""Nodes that all nodes are compared with per step."""

K = tl.constexpr(MATCHES)
DEPTH = tl.constexpr(MAX_CHAIN)
SHORTEST, LONGEST = tl.constexpr(ngrams.SHORTEST), tl.constexpr(ngrams.LONGEST)
BUCKETS = tl.constexpr(ngrams.BUCKETS)
CELLS = tl.constexpr(ngrams.LENGTHS * ngrams.BUCKETS)
CELL_SLOTS = tl.constexpr(triton.next_power_of_2(ngrams.LENGTHS * ngrams.BUCKETS))
MISSES, TRIALS = tl.constexpr(ngrams.PRIOR_MISSES), tl.constexpr(ngrams.PRIOR_TRIALS)
LOG2_MEMORY = tl.constexpr(math.log2(ngrams.MEMORY))
ABSENT = tl.constexpr(-(1 << 62))


def match_triton(table: NgramTable, row_B: Tensor, last_B: Tensor, depth: int) -> Matches:
    B, T = len(row_B), table.text_RT.shape[1]
    token_BKD = torch.empty(B, MATCHES, depth, dtype=torch.int64, device=row_B.device)
    rate_BKD = torch.empty(B, MATCHES, depth, dtype=torch.float32, device=row_B.device)
    length_BK = torch.empty(B, MATCHES, dtype=torch.int64, device=row_B.device)
    inputs, found = (table.text_RT, table.count_R2LX, row_B, table.end(last_B)), (token_BKD, rate_BKD, length_BK)
    sizes = {"BLOCK": min(BLOCK, triton.next_power_of_2(T)), "num_warps": 8}
    launch(_match_kernel, (B,), *inputs, *found, T, depth, **sizes)
    return Matches(*found)


@triton.jit
def _match_kernel(text_ptr, count_ptr, row_ptr, last_ptr, token_ptr, rate_ptr, length_ptr, T, D, BLOCK: tl.constexpr):
    """Find the best positions, from the end of the text to its beginning. Keys are lengths, then positions."""
    # empty slots have distinct keys below those of matches
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + request).to(tl.int64)
    last = tl.load(last_ptr + request).to(tl.int32)
    text_ptr += row * T
    best_K = -1 - tl.arange(0, K).to(tl.int64)
    worst = tl.min(best_K)

    # earlier positions lose against as many matches of the greatest length
    start = last // BLOCK * BLOCK
    while (start >= 0) & (worst >> 32 < LONGEST):
        position = start + tl.arange(0, BLOCK)
        is_equal = position < last
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            end = tl.load(text_ptr + last - back, mask=back <= last, other=-1)
            token = tl.load(text_ptr + position - back, mask=is_equal & (position >= back), other=-1)
            is_equal &= (token == end) & (token >= 0)
            length += is_equal.to(tl.int32)
        key = tl.where(length >= SHORTEST, length.to(tl.int64) << 32 | position, ABSENT)
        best = tl.max(key)
        while best > worst:
            best_K = tl.where(best_K == worst, best, best_K)
            key = tl.where(key == best, ABSENT, key)
            best, worst = tl.max(key), tl.min(best_K)
        start -= BLOCK

    # chains with their rates
    depth = tl.arange(0, DEPTH)
    for k in range(K):
        best = tl.max(best_K)
        best_K = tl.where(best_K == best, ABSENT, best_K)
        length = tl.where(best > 0, best >> 32, 0).to(tl.int32)
        end = tl.where(best > 0, best & 0x7FFFFFFF, 0).to(tl.int32)
        index = end + 1 + depth % tl.maximum(last - end, 1)
        token = tl.load(text_ptr + tl.minimum(index, last)).to(tl.int64)
        agreed = (length + depth).to(tl.float32)
        bucket = (depth >= 1).to(tl.int32) + (depth >= 2).to(tl.int32) + (depth >= 4).to(tl.int32)
        bucket += (depth >= 8).to(tl.int32)
        cell = tl.maximum(length - SHORTEST, 0) * BUCKETS + bucket
        trials = TRIALS + tl.load(count_ptr + row * 2 * CELLS + cell)
        hits = TRIALS * agreed / (agreed + MISSES) + tl.load(count_ptr + (row * 2 + 1) * CELLS + cell)
        out = (request * K + k) * D + depth
        tl.store(token_ptr + out, token, mask=depth < D)
        tl.store(rate_ptr + out, tl.where(best > 0, hits / trials, 0.0), mask=depth < D)
        tl.store(length_ptr + request * K + k, length.to(tl.int64))


def append_triton(table: NgramTable, row_B: Tensor, last_B: Tensor, token_BX: Tensor) -> None:
    (B, X), T = token_BX.shape, table.text_RT.shape[1]
    sizes = {"TOKENS": triton.next_power_of_2(X), "num_warps": 1}
    launch(_append_kernel, (B,), table.text_RT, row_B, table.end(last_B), token_BX.contiguous(), X, T, **sizes)


@triton.jit
def _append_kernel(text_ptr, row_ptr, last_ptr, token_ptr, X, T, TOKENS: tl.constexpr):
    request, i = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    row, last = tl.load(row_ptr + request).to(tl.int64), tl.load(last_ptr + request)
    token = tl.load(token_ptr + request * X + i, mask=i < X)
    tl.store(text_ptr + row * T + last + 1 + i, token.to(tl.int32), mask=i < X)


def learn_triton(table: NgramTable, row_B: Tensor, matches: Matches, tree: DraftTree, verdict: Acceptance) -> Tensor:
    (B, X), D, N = verdict.token_BD1.shape, matches.token_BKD.shape[2], tree.token_BN.shape[1]
    by_ngrams_B = torch.empty_like(verdict.length_B)
    chosen = verdict.token_BD1.contiguous(), verdict.path_BD1.contiguous(), verdict.length_B, tree.is_ngram_BN
    inputs = table.count_R2LX, row_B, matches.token_BKD, matches.length_BK, *chosen, by_ngrams_B
    launch(_learn_kernel, (B,), *inputs, X, D, N, TOKENS=triton.next_power_of_2(X), num_warps=1)
    return by_ngrams_B


@triton.jit
def _learn_kernel(
    count_ptr,
    row_ptr,
    chain_ptr,
    match_ptr,
    token_ptr,
    path_ptr,
    accepted_ptr,
    is_ngram_ptr,
    by_ngrams_ptr,
    X,
    D,
    N,
    TOKENS: tl.constexpr,
):
    """Trials and hits of all cells at once: a chain hits from its beginning to its first miss."""
    request = tl.program_id(0).to(tl.int64)
    row, accepted = tl.load(row_ptr + request).to(tl.int64), tl.load(accepted_ptr + request).to(tl.int32)
    depth, cell = tl.arange(0, DEPTH), tl.arange(0, CELL_SLOTS)
    known = tl.minimum(tl.minimum(D, X), accepted + 1)
    first = (1 << cell % BUCKETS) >> 1  # depth of the cell's first token, from 0
    end = 1 << cell % BUCKETS
    trials, hits = tl.zeros([CELL_SLOTS], tl.int32), tl.zeros([CELL_SLOTS], tl.int32)
    token = tl.load(token_ptr + request * X + depth, mask=depth < known, other=-1)
    for k in range(K):
        length = tl.load(match_ptr + request * K + k).to(tl.int32)
        chain = tl.load(chain_ptr + (request * K + k) * D + depth, mask=depth < known, other=-2)
        num_hits = tl.min(tl.where(chain == token, DEPTH, depth))
        is_own = (length > 0) & (cell // BUCKETS == length - SHORTEST)
        hits += tl.where(is_own, tl.maximum(tl.minimum(num_hits, end) - first, 0), 0)
        trials += tl.where(is_own, tl.maximum(tl.minimum(tl.minimum(num_hits + 1, known), end) - first, 0), 0)

    kept = tl.exp2(trials.to(tl.float32) * LOG2_MEMORY)
    trial_ptr = count_ptr + row * 2 * CELLS + cell
    old_trials = tl.load(trial_ptr, mask=cell < CELLS, other=0.0)
    old_hits = tl.load(trial_ptr + CELLS, mask=cell < CELLS, other=0.0)
    tl.store(trial_ptr, old_trials * kept + trials.to(tl.float32), mask=cell < CELLS)
    tl.store(trial_ptr + CELLS, old_hits * kept + hits.to(tl.float32), mask=cell < CELLS)

    by_ngrams = 0
    if is_ngram_ptr is not None:
        step = tl.arange(0, TOKENS)
        on_path = (step < X) & (step <= accepted)
        node = tl.load(path_ptr + request * X + step, mask=on_path, other=0)
        is_ngram = tl.load(is_ngram_ptr + request * N + node, mask=on_path, other=0)
        by_ngrams = tl.sum(is_ngram.to(tl.int32))
    tl.store(by_ngrams_ptr + request, by_ngrams)


def merge_triton(tree: DraftTree, matches: Matches, budget: int, width: int) -> DraftTree:
    assert tree.score_BN is not None
    (B, N), D, device = tree.token_BN.shape, matches.token_BKD.shape[2], tree.token_BN.device
    M = N + MATCHES * D
    size, max_depth = min(budget, M), max(tree.max_depth, D)
    union = torch.empty(B, 4, M, dtype=torch.int32, device=device)
    score_BM = torch.empty(B, M, dtype=torch.float32, device=device)
    token_BN = torch.empty(B, size, dtype=torch.int64, device=device)
    parent_BN, depth_BN = torch.empty_like(token_BN), torch.empty_like(token_BN)
    score_BN, is_ngram_BN = score_BM.new_empty(B, size), torch.empty(B, size, dtype=torch.bool, device=device)
    size_B = torch.empty_like(tree.size_B)

    nodes = tuple(
        x.contiguous() for x in (tree.token_BN, tree.parent_BN, tree.depth_BN, tree.score_BN, tree.ancestor_BNW)
    )
    chains = matches.token_BKD, matches.rate_BKD, matches.length_BK
    out = token_BN, parent_BN, depth_BN, score_BN, is_ngram_BN
    numbers = N, D, tree.ancestor_BNW.shape[2], M, size, budget, width, max_depth
    sizes: dict[str, Any] = {"NODES": triton.next_power_of_2(N), "SLOTS": triton.next_power_of_2(M), "TILE": TILE}
    launch(_merge_kernel, (B,), nodes, chains, union, score_BM, out, size_B, *numbers, **sizes, num_warps=8)
    W = -(-size // WORD)
    ancestor_BNW = torch.empty(B, size, W, dtype=torch.int32, device=device)
    sizes = {"NODES": NODES, "WORDS": triton.next_power_of_2(W), "num_warps": 1}
    launch(ancestor_kernel, (B, -(-size // NODES)), parent_BN, ancestor_BNW, size, W, max_depth, **sizes)
    return DraftTree(token_BN, parent_BN, depth_BN, ancestor_BNW, size_B, max_depth, score_BN, is_ngram_BN)


@triton.jit
def _merge_kernel(
    nodes,
    chains,
    union_ptr,
    score_ptr,
    out,
    size_ptr,
    N,
    D,
    W,
    M,
    size,
    budget,
    width,
    max_depth,
    NODES: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the union, ranks its nodes, drops those past the width with all below them, and keeps the best."""
    request = tl.program_id(0).to(tl.int64)
    parent_ptr = union_ptr + request * 4 * M
    depth_ptr, place_ptr, fits_ptr = parent_ptr + M, parent_ptr + 2 * M, parent_ptr + 3 * M
    score_ptr += request * M
    chain_ptr, rate_ptr, match_ptr = chains
    chains = chain_ptr + request * K * D, rate_ptr + request * K * D, match_ptr + request * K
    _write_union(nodes, chains, parent_ptr, depth_ptr, score_ptr, request, N, D, W, NODES)
    tl.debug_barrier()

    # ranks among all nodes and among siblings
    slot = tl.arange(0, SLOTS)
    parent = tl.load(parent_ptr + slot, mask=slot < M, other=-1)
    depth = tl.load(depth_ptr + slot, mask=slot < M, other=0)
    score = tl.load(score_ptr + slot, mask=slot < M, other=-float("inf"))
    place, sibling = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.int32)
    for start in range(0, M, TILE):
        other = start + tl.arange(0, TILE)
        other_score = tl.load(score_ptr + other, mask=other < M, other=-float("inf"))[None, :]
        other_depth = tl.load(depth_ptr + other, mask=other < M, other=0)[None, :]
        other_parent = tl.load(parent_ptr + other, mask=(other < M) & (other > 0), other=-2)[None, :]
        is_first = (other_depth < depth[:, None]) | ((other_depth == depth[:, None]) & (other[None, :] < slot[:, None]))
        is_better = (other_score > score[:, None]) | ((other_score == score[:, None]) & is_first)
        place += tl.sum(is_better.to(tl.int32), axis=1)
        sibling += tl.sum((is_better & (other_parent == parent[:, None])).to(tl.int32), axis=1)
    is_real = score > -float("inf")
    fits = (sibling < width) | (slot == 0)

    # drop what does not fit, which is rare
    is_kept = is_real
    if tl.max((is_real & ~fits).to(tl.int32)) > 0:
        tl.store(fits_ptr + slot, fits.to(tl.int32), mask=slot < M)
        tl.store(place_ptr + slot, place, mask=slot < M)
        tl.debug_barrier()
        is_kept &= fits
        above = parent
        for _ in range(max_depth):
            is_kept &= tl.load(fits_ptr + above, mask=is_real, other=0) > 0
            above = tl.load(parent_ptr + above, mask=is_real, other=0)
        tl.debug_barrier()
        tl.store(fits_ptr + slot, is_kept.to(tl.int32), mask=slot < M)
        tl.debug_barrier()
        rank, place = place, tl.zeros([SLOTS], tl.int32)
        for start in range(0, M, TILE):
            other = start + tl.arange(0, TILE)
            other_rank = tl.load(place_ptr + other, mask=other < M, other=0)[None, :]
            is_other_kept = tl.load(fits_ptr + other, mask=other < M, other=0)[None, :] > 0
            place += tl.sum((is_other_kept & (other_rank < rank[:, None])).to(tl.int32), axis=1)
        tl.debug_barrier()

    # write the best nodes in order
    is_kept &= place < budget
    tl.store(place_ptr + slot, place, mask=slot < M)
    tl.debug_barrier()
    token_ptr, tree_parent_ptr, tree_depth_ptr, tree_score_ptr, is_ngram_ptr = out
    place += request * size
    token = tl.load(nodes[0] + request * N + slot, mask=is_kept & (slot < N), other=0)
    token += tl.load(chains[0] + slot - N, mask=is_kept & (slot >= N), other=0)
    tl.store(token_ptr + place, token, mask=is_kept)
    tl.store(tree_parent_ptr + place, tl.load(place_ptr + parent, mask=is_kept, other=0), mask=is_kept)
    tl.store(tree_depth_ptr + place, depth, mask=is_kept)
    tl.store(tree_score_ptr + place, score, mask=is_kept)
    tl.store(is_ngram_ptr + place, slot >= N, mask=is_kept)
    num_kept = tl.sum(is_kept.to(tl.int32))
    tl.store(size_ptr + request, num_kept)
    padding, place = (slot >= num_kept) & (slot < size), request * size + slot
    tl.store(token_ptr + place, 0, mask=padding)
    tl.store(tree_parent_ptr + place, slot, mask=padding)
    tl.store(tree_depth_ptr + place, 0, mask=padding)
    tl.store(tree_score_ptr + place, -float("inf"), mask=padding)
    tl.store(is_ngram_ptr + place, False, mask=padding)


@triton.jit
def _write_union(nodes, chains, parent_out, depth_out, score_out, request, N, D, W, NODES: tl.constexpr):
    """Follow the chains into the head's tree and out of it, all of them one token at a time.

    Nodes below a chain's last node in the tree are raised as much as that node, and not above it.
    """
    node_token_ptr, node_parent_ptr, node_depth_ptr, node_score_ptr, ancestor_ptr = nodes
    chain_ptr, rate_ptr, match_ptr = chains
    node = tl.arange(0, NODES)
    at = request * N + node
    token_N = tl.load(node_token_ptr + at, mask=node < N, other=-1)[None, :]
    parent = tl.load(node_parent_ptr + at, mask=node < N, other=0).to(tl.int32)
    depth = tl.load(node_depth_ptr + at, mask=node < N, other=0).to(tl.int32)
    score = tl.load(node_score_ptr + at, mask=node < N, other=-float("inf"))
    above = tl.load(node_score_ptr + request * N + parent, mask=node < N, other=0.0)
    is_child_N = (depth > 0)[None, :]
    raised_N, cap_N = tl.zeros([1, NODES], tl.float32), tl.full([1, NODES], 0.0, tl.float32)

    k, other = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :]
    is_present = tl.load(match_ptr + k) > 0
    is_equal = is_present & (tl.load(match_ptr + other) > 0)
    current, first = tl.where(is_present, 0, -1), k
    raised_K, score_K = tl.zeros([K, 1], tl.float32), tl.zeros([K, 1], tl.float32)
    for d in range(D):
        token_K = tl.load(chain_ptr + k * D + d)
        is_equal &= token_K == tl.load(chain_ptr + other * D + d)
        rate_K = tl.max(tl.where(is_equal, tl.load(rate_ptr + other * D + d), 0.0), axis=1, keep_dims=True)
        next_first = tl.min(tl.where(is_equal, other, K), axis=1, keep_dims=True)

        # the node of the head, raised
        is_next = is_child_N & (parent[None, :] == current) & (token_N == token_K)
        following = tl.max(tl.where(is_next, node[None, :], -1), axis=1, keep_dims=True)
        is_inside = following >= 0
        own_K = tl.sum(tl.where(is_next, score[None, :], 0.0), axis=1, keep_dims=True)
        step = own_K - tl.sum(tl.where(is_next, above[None, :], 0.0), axis=1, keep_dims=True)
        prob = tl.exp(step)
        likely = tl.log(tl.maximum(tl.minimum(prob + rate_K - prob * rate_K, 1.0), 1e-37))
        raised_K += tl.where(is_inside, tl.maximum(likely - step, 0.0), 0.0)
        inside_K = tl.minimum(own_K + raised_K, score_K)
        score_K = tl.where(is_inside, inside_K, score_K + tl.log(tl.maximum(rate_K, 1e-37)))
        word = tl.load(
            ancestor_ptr + (request * N + node[None, :]) * W + following // 32,
            mask=is_inside & (node < N)[None, :],
            other=0,
        )
        is_below = is_inside & ((word >> following % 32 & 1) > 0)
        raised_N = tl.maximum(raised_N, tl.max(tl.where(is_below, raised_K, 0.0), axis=0, keep_dims=True))
        cap_N = tl.minimum(cap_N, tl.min(tl.where(is_below, score_K, 0.0), axis=0, keep_dims=True))

        # the node of the chain alone
        is_new = is_present & (following < 0) & (next_first == k)
        out = N + k * D + d
        tl.store(parent_out + out, tl.where(current >= 0, current, N + first * D + d - 1))
        tl.store(depth_out + out, tl.zeros([K, 1], tl.int32) + d + 1)
        tl.store(score_out + out, tl.where(is_new, score_K, -float("inf")))
        current, first = following, next_first

    tl.store(parent_out + node, parent, mask=node < N)
    tl.store(depth_out + node, depth, mask=node < N)
    lifted = tl.minimum(score[None, :] + raised_N, cap_N)
    lifted = tl.where(score[None, :] > -float("inf"), lifted, score[None, :])
    tl.store(score_out + node[None, :], lifted, mask=(node < N)[None, :])
