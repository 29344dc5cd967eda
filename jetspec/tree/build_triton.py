"""Triton kernels of `build_tree`: best-first search with one program per request, then masks from parents.

Siblings are lazy: a node enters the frontier when its better sibling leaves it. So every pop adds at most one entry
(the first child) and replaces one (the popped node by its next sibling): a frontier of N slots suffices for N pops.

Layout, contiguous: candidate tokens are (B, D, C); their log-probabilities (B, D, C), with edges (B, D, C, K) with
indices of the same shape; entropies (B, D); tokens, parents, depths and scores of nodes (B, N); masks (B, N, W).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.ops.overlap_triton import launch
from jetspec.tree.draft_tree import WORD, Candidates, DraftTree
from jetspec.tree.edge_triton import edge_children_triton

NODES = 32
"""Nodes per program of the mask kernel."""

# Key of an empty slot, above any other.
EMPTY = tl.constexpr(1 << 62)


def build_tree_triton(anchor_B: Tensor, candidates: Candidates, config: TreeConfig, depth: int) -> DraftTree:
    B, D, C = candidates.token_BDC.shape
    K = min(config.width, C)
    max_depth = min(depth, config.budget - 1)
    N = _most_nodes(config.budget, K, max_depth)
    anchor_B = anchor_B.contiguous()
    token_BDC, logprob = candidates.token_BDC.contiguous(), candidates.logprob_BDC.contiguous()
    entropy_BD = index_BDCK = None
    if config.score != "accum_logp" and candidates.entropy_BD is not None:
        entropy_BD = candidates.entropy_BD.contiguous()
    if candidates.edge is not None:
        index_BDCK, logprob = edge_children_triton(anchor_B, candidates, K, max_depth)

    token_BN = anchor_B.new_empty(B, N)
    parent_BN, depth_BN = torch.empty_like(token_BN), torch.empty_like(token_BN)
    score_BN = logprob.new_empty(B, N)
    size_B = torch.empty_like(anchor_B)
    W = -(-N // WORD)
    ancestor_BNW = torch.empty(B, N, W, dtype=torch.int32, device=anchor_B.device)
    inputs, nodes = (anchor_B, token_BDC, logprob, index_BDCK, entropy_BD), (token_BN, parent_BN, depth_BN, score_BN)
    numbers = N, D, C, K, max_depth, config.entropy_weight
    sizes: dict[str, Any] = {"SCORE": config.score, "PAPER": config.expand == "paper"}
    sizes |= {"SLOTS": triton.next_power_of_2(N), "WIDTH": triton.next_power_of_2(max(K, 1)), "num_warps": 1}
    # No fusion: a product and a sum round twice in the reference.
    launch(_build_tree_kernel, (B,), *inputs, nodes, size_B, *numbers, **sizes, enable_fp_fusion=False)
    sizes = {"NODES": NODES, "WORDS": triton.next_power_of_2(W), "num_warps": 1}
    launch(ancestor_kernel, (B, -(-N // NODES)), parent_BN, ancestor_BNW, N, W, max_depth, **sizes)
    return DraftTree(token_BN, parent_BN, depth_BN, ancestor_BNW, size_B, max_depth, score_BN)


def _most_nodes(budget: int, width: int, max_depth: int) -> int:
    """Return the size of a tree when no candidate is absent. Depth d holds at most `budget - d` nodes: d are above."""
    total = level = 1
    for d in range(1, max_depth + 1):
        level = min(level * width, budget - d)
        total += level
    return min(budget, total)


@triton.jit
def _build_tree_kernel(
    anchor_ptr,
    token_ptr,
    logprob_ptr,
    index_ptr,
    entropy_ptr,
    nodes,
    size_ptr,
    N,
    D,
    C,
    K,
    max_depth,
    entropy_weight,
    SCORE: tl.constexpr,
    PAPER: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Pop the best entry, add its nodes to the tree, replace it by its next sibling and append its first child.

    An entry has a key (`_key`: score and identity of the node) and three values of its parent: `above`, its score;
    `place`, its index in the shortlist; `first`, the index of its first child in a `paper` tree. The children of a
    parent are a row of K log-probabilities. With edges every parent has its own row, and `index_ptr` holds the
    children's indices in the shortlist.
    """
    # empty frontier with the root
    row = tl.program_id(0).to(tl.int64)
    own = row * N
    node_token_ptr, node_parent_ptr, node_depth_ptr, node_score_ptr = nodes
    nodes = node_token_ptr + own, node_parent_ptr + own, node_depth_ptr + own, node_score_ptr + own
    anchor = tl.load(anchor_ptr + row)
    slot = tl.arange(0, SLOTS)
    rank_K = tl.arange(0, WIDTH)

    key_S = tl.where(slot == 0, 0, EMPTY).to(tl.int64)
    above_S = tl.zeros([SLOTS], tl.float32)
    place_S = tl.zeros([SLOTS], tl.int32)
    first_S = tl.zeros([SLOTS], tl.int32)
    deepest = max_depth  # depth of the last nodes to expand
    count = 0
    if PAPER:
        deepest -= 1
        count = 1
        _write(nodes, 0, anchor, 0, 0, 0.0, True)

    pops = 0
    key, above, place, first = tl.reduce((key_S, above_S, place_S, first_S), 0, _better)
    while (count < N) & (key != EMPTY):
        # locate the node, its siblings and its children
        score, depth, parent, rank = _read_key(key)
        siblings = _family(row, depth, place, D, C, K, index_ptr)
        own_place = rank if index_ptr is None else tl.load(index_ptr + siblings + rank, mask=depth > 0, other=0)
        children = _family(row, depth + 1, own_place, D, C, K, index_ptr)
        added = count

        # add all children (paper) or the node itself (optimal)
        if PAPER:
            logprob_K = tl.load(
                logprob_ptr + children + rank_K, mask=(rank_K < K) & (depth < max_depth), other=-float("inf")
            )
            present_K = logprob_K > -float("inf")
            keep_K = present_K & (count + rank_K < N)
            place_K = rank_K if index_ptr is None else tl.load(index_ptr + children + rank_K, mask=keep_K, other=0)
            token_K = tl.load(token_ptr + (row * D + depth) * C + place_K, mask=keep_K, other=0)
            score_K = score + _increment(logprob_K, entropy_ptr, entropy_weight, row * D + depth, keep_K, SCORE)
            _write(nodes, count + rank_K, token_K, first + rank, depth + 1, score_K, keep_K)
            count += tl.sum(present_K.to(tl.int32))
        else:
            token = tl.load(token_ptr + (row * D + depth - 1) * C + own_place, mask=depth > 0, other=anchor)
            _write(nodes, pops, token, parent, depth, score, True)
            count += 1

        # keys of the next sibling and of the first child
        has_sibling = (depth > 0) & (rank + 1 < K)
        logprob = tl.load(logprob_ptr + siblings + rank + 1, mask=has_sibling, other=-float("inf"))
        step = _increment(logprob, entropy_ptr, entropy_weight, row * D + depth - 1, has_sibling, SCORE)
        sibling_key = _key(above + step, depth, parent, rank + 1)
        has_child = depth < deepest
        logprob = tl.load(logprob_ptr + children, mask=has_child, other=-float("inf"))
        step = _increment(logprob, entropy_ptr, entropy_weight, row * D + depth, has_child, SCORE)
        child_key = _key(score + step, depth + 1, pops, 0)

        # update the frontier
        pops += 1
        is_new = slot == pops
        key_S = tl.where(key_S == key, sibling_key, tl.where(is_new, child_key, key_S))
        above_S = tl.where(is_new, score, above_S)
        place_S = tl.where(is_new, own_place, place_S)
        first_S = tl.where(is_new, added, first_S)
        key, above, place, first = tl.reduce((key_S, above_S, place_S, first_S), 0, _better)

    # store the size and the padding
    size = tl.minimum(count, N)
    tl.store(size_ptr + row, size)
    padding = (slot >= size) & (slot < N)
    _write(nodes, slot, 0, slot, 0, -float("inf"), padding)


@triton.jit
def _better(key_a, above_a, place_a, first_a, key_b, above_b, place_b, first_b):
    """Return the entry with the smaller key."""
    a = key_a <= key_b
    return (
        tl.where(a, key_a, key_b),
        tl.where(a, above_a, above_b),
        tl.where(a, place_a, place_b),
        tl.where(a, first_a, first_b),
    )


@triton.jit
def _key(score, depth, parent, rank):
    """Return the total order of nodes as a number, smallest best: cost (31 bits), depth (10), parent (10), rank (6).

    A score is at most 0, so its bits without the sign rise as it falls. `parent` is numbered by pops.
    """
    cost = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    key = cost.to(tl.int64) << 26 | (depth << 16 | parent << 6 | rank).to(tl.int64)
    return tl.where(score > -float("inf"), key, EMPTY)


@triton.jit
def _read_key(key):
    """Return the score, depth, parent and rank of a key."""
    score = 0.0 - (key >> 26).to(tl.int32).to(tl.float32, bitcast=True)
    low = key.to(tl.int32)
    return score, low >> 16 & 1023, low >> 6 & 1023, low & 63


@triton.jit
def _family(row, depth, place, D, C, K, index_ptr):
    """Return the offset of the children at `depth` of the parent with index `place` in its shortlist."""
    level = (row * D + depth - 1) * C
    if index_ptr is not None:
        level = (level + place) * K
    return level


@triton.jit
def _increment(logprob, entropy_ptr, entropy_weight, level, mask, SCORE: tl.constexpr):
    """Return the difference between a node's score and its parent's: at most 0, -inf if absent or NaN. NaN is tested
    for, because its minimum with 0 is 0 on a GPU."""
    step = logprob
    if SCORE != "accum_logp":
        # A level has one entropy: every lane loads the same number.
        entropy = tl.load(entropy_ptr + level + tl.zeros_like(logprob).to(tl.int32), mask=mask, other=0.0)
        if SCORE == "hybrid":
            step = logprob - entropy_weight * entropy
        else:
            step = tl.where(logprob > -float("inf"), -entropy, logprob)
    return tl.where(step == step, tl.minimum(step, 0.0), -float("inf"))


@triton.jit
def _write(nodes, node, token, parent, depth, score, mask):
    token_ptr, parent_ptr, depth_ptr, score_ptr = nodes
    tl.store(token_ptr + node, token, mask=mask)
    tl.store(parent_ptr + node, parent, mask=mask)
    tl.store(depth_ptr + node, depth, mask=mask)
    tl.store(score_ptr + node, score, mask=mask)


@triton.jit
def ancestor_kernel(parent_ptr, ancestor_ptr, N, W, max_depth, NODES: tl.constexpr, WORDS: tl.constexpr):
    """Masks of a block of nodes: climb from each to the root, which is its own parent, setting one bit per step."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    word = tl.arange(0, WORDS)
    current = node
    bits = tl.zeros([NODES, WORDS], tl.int32)
    for _ in range(max_depth + 1):
        bit = tl.full([NODES], 1, tl.int32) << current % 32
        bits |= tl.where((current // 32)[:, None] == word[None, :], bit[:, None], 0)
        current = tl.load(parent_ptr + row * N + current, mask=node < N, other=0).to(tl.int32)
    out_ptr = ancestor_ptr + (row * N + node[:, None]) * W + word[None, :]
    tl.store(out_ptr, bits, mask=(node < N)[:, None] & (word < W)[None, :])
