"""Triton kernel of `tally_choices`, one program per tree.

Layout, contiguous: token, parent, depth and score of the tree are (B, N), committed tokens (B, X), the tally is (S, D,
SUMS), the weights are (S, D) with a stride between entries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.noise_triton import gumbel_at
from jetspec.ops.overlap_triton import launch
from jetspec.tree.draft_tree import Acceptance, DraftTree
from jetspec.tree.tally import SUMS, Drawn


def tally_choices_triton(tally_SDX: Tensor, drawn: Drawn, tree: DraftTree, verdict: Acceptance) -> None:
    (B, N), X = tree.token_BN.shape, verdict.token_BD1.shape[1]
    assert tree.score_BN is not None
    nodes = tuple(x.contiguous() for x in (tree.token_BN, tree.parent_BN, tree.depth_BN, tree.score_BN))
    chosen = verdict.token_BD1.contiguous(), verdict.length_B
    numbers = N, X, min(X, tally_SDX.shape[1]), tally_SDX.stride(0), drawn.weight_SD.stride(0)
    sizes = {"NODES": triton.next_power_of_2(N), "SUMS": SUMS, "num_warps": 1 if N <= 64 else 4}
    launch(_tally_kernel, (B,), tally_SDX, drawn, nodes, chosen, *numbers, **sizes)


@triton.jit
def _tally_kernel(
    tally_ptr,
    drawn,
    nodes,
    chosen,
    N,
    X,
    steps,
    tally_stride,
    weight_stride,
    NODES: tl.constexpr,
    SUMS: tl.constexpr,
):
    entry_ptr, seed_ptr, cached_len_ptr, weight_ptr = drawn
    token_ptr, parent_ptr, depth_ptr, score_ptr = nodes
    chosen_ptr, length_ptr = chosen
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entry_ptr + row)
    if entry == 0:
        return
    # load the tree
    node = tl.arange(0, NODES)
    is_node = node < N
    token = tl.load(token_ptr + row * N + node, mask=is_node, other=-1)
    parent = tl.load(parent_ptr + row * N + node, mask=is_node, other=-1)
    depth = tl.load(depth_ptr + row * N + node, mask=is_node, other=0)
    score = tl.load(score_ptr + row * N + node, mask=is_node, other=-float("inf"))
    position = tl.load(cached_len_ptr + row) + depth
    noise = gumbel_at(tl.load(seed_ptr + row) + tl.zeros_like(token), position, tl.maximum(token, 0))

    # committed tokens, as long as they lie on a path
    steps = tl.minimum(steps, tl.load(length_ptr + row) + 1)
    at = tl.zeros([], tl.int32)
    for step in range(steps):
        is_child = is_node & (parent == at) & (depth == step + 1)
        is_taken = is_child & (token == tl.load(chosen_ptr + row * X + step))
        taken = tl.min(tl.where(is_taken, node, NODES))
        if taken < NODES:
            odds = tl.where(is_child, score - tl.load(score_ptr + row * N + at), -float("inf"))
            prob = tl.exp(odds - tl.max(odds))
            prob /= tl.sum(prob)
            weight = tl.load(weight_ptr + entry * weight_stride + step)
            of_logit = tl.where(is_child, odds - weight * noise, 0.0)
            of_noise = tl.where(is_child, noise, 0.0)
            mean_logit, mean_noise = tl.sum(prob * of_logit), tl.sum(prob * of_noise)
            out = tally_ptr + entry * tally_stride + step * SUMS
            tl.atomic_add(out, 1.0)
            tl.atomic_add(out + 1, tl.sum(tl.where(is_taken, of_logit, 0.0)) - mean_logit)
            tl.atomic_add(out + 2, tl.sum(tl.where(is_taken, of_noise, 0.0)) - mean_noise)
            of_logit, of_noise = of_logit - mean_logit, of_noise - mean_noise
            tl.atomic_add(out + 3, tl.sum(prob * of_logit * of_logit))
            tl.atomic_add(out + 4, tl.sum(prob * of_logit * of_noise))
            tl.atomic_add(out + 5, tl.sum(prob * of_noise * of_noise))
        at = taken  # NODES: a node without children
