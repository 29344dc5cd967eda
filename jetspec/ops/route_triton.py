"""The Triton kernel of `route`: one program per row chooses the experts.

An expert's rank is the number of better experts: no sort, only a table of all pairs, a few experts at a time.

Layout: logits (T, E), expert (T, K) int64, weight (T, K), all contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait

RANK_TABLE = 128 * 128
"""Pairs of experts that are compared at once."""


def route_triton(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (T, E), device = logits_TE.shape, logits_TE.device
    expert_TK = torch.empty((T, num_chosen), dtype=torch.int64, device=device)
    weight_TK = torch.empty((T, num_chosen), dtype=dtype, device=device)
    if T == 0:
        return expert_TK, weight_TK
    experts = triton.next_power_of_2(E)
    with torch.cuda.device_of(logits_TE):
        _route_kernel[(T,)](
            logits_TE.contiguous(),
            expert_TK,
            weight_TK,
            E=E,
            CHOSEN=num_chosen,
            NORMALIZE=normalize,
            EXPERTS=experts,
            OTHERS=min(experts, RANK_TABLE // experts),
            num_warps=4 if E <= 128 else 8,
            **overlap(logits_TE),
        )
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
