"""Triton kernel of `accept`: one program walks one tree.

All tensors are contiguous int64: token, parent, depth and choice are (B, N), the path and the committed tokens are
(B, D + 1) with D = `max_depth`, the length and the bonus are (B,).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.tree.draft_tree import Acceptance, DraftTree


def accept_triton(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    """`choice_BN` holds the target's token after every node."""
    B, N = choice_BN.shape
    path_BD1 = choice_BN.new_empty(B, tree.max_depth + 1)
    token_BD1 = torch.empty_like(path_BD1)
    length_B, bonus_B = choice_BN.new_empty(B), choice_BN.new_empty(B)
    with torch.cuda.device_of(choice_BN):
        _accept_kernel[(B,)](
            *(tree.token_BN.contiguous(), tree.parent_BN.contiguous(), tree.depth_BN.contiguous()),
            *(choice_BN.contiguous(), path_BD1, token_BD1, length_B, bonus_B, N, tree.max_depth),
            NODES=triton.next_power_of_2(N),
            num_warps=1 if N <= 256 else 4,
        )
    return Acceptance(path_BD1, length_B, bonus_B, token_BD1)


@triton.jit
def _accept_kernel(
    token_ptr,
    parent_ptr,
    depth_ptr,
    choice_ptr,
    path_ptr,
    committed_ptr,
    length_ptr,
    bonus_ptr,
    N,
    max_depth,
    NODES: tl.constexpr,
):
    """Step to the child that carries the choice, `max_depth + 1` times; past the last child the node stays the same.

    The choice after the current node is the next committed token: a draft token if a child carries it, else the bonus.
    """
    # load the tree
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    token = tl.load(token_ptr + row * N + node, mask=node < N, other=-1)
    parent = tl.load(parent_ptr + row * N + node, mask=node < N, other=-1)
    # Padding and the root have depth 0, so they never count as children.
    is_child = tl.load(depth_ptr + row * N + node, mask=node < N, other=0) > 0

    # walk
    current = tl.zeros([], tl.int32)
    length = tl.zeros([], tl.int32)
    for step in range(max_depth + 1):
        choice = tl.load(choice_ptr + row * N + current)
        out = row * (max_depth + 1) + step
        tl.store(path_ptr + out, current)
        tl.store(committed_ptr + out, choice)
        child = tl.min(tl.where(is_child & (parent == current) & (token == choice), node, NODES))
        length += (child < NODES).to(tl.int32)
        current = tl.where(child < NODES, child, current)

    # store length and bonus
    tl.store(length_ptr + row, length)
    tl.store(bonus_ptr + row, tl.load(choice_ptr + row * N + current))
