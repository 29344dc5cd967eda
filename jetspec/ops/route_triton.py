"""The Triton kernels of `norm_route`: the product with the router in parts of its depth, so that even so small a weight
is read by many programs at once, then one program per row that adds these up, finishes the norm and chooses."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait

ROUTER_EXPERTS, ROUTER_DEPTH = 64, 128
"""What a program of the product reads of the router."""
RANK_TABLE = 128 * 128
"""Pairs of experts that are compared at once."""


def norm_route_triton(
    scaled_TM: Tensor, squares: Tensor, eps: float, router: Tensor, num_chosen: int, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Finishes a norm that was begun: see `Residual`."""
    (T, M), E = scaled_TM.shape, len(router)
    num_slices = triton.cdiv(M, ROUTER_DEPTH)
    part = torch.empty((num_slices, T, E), dtype=torch.float32, device=scaled_TM.device)
    with torch.cuda.device_of(scaled_TM):
        _router_kernel[(num_slices, triton.cdiv(E, ROUTER_EXPERTS))](
            scaled_TM,
            router,
            part,
            T,
            M=M,
            E=E,
            TOKENS=max(16, triton.next_power_of_2(T)),
            EXPERTS=ROUTER_EXPERTS,
            DEPTH=ROUTER_DEPTH,
            num_warps=4,
            **overlap(scaled_TM),
        )
    x_TM = torch.empty_like(scaled_TM)
    return x_TM, *_choose(part, num_chosen, normalize, scaled_TM.dtype, scaled_TM, squares, eps, x_TM)


def route_triton(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _choose(logits_TE.contiguous()[None], num_chosen, normalize, dtype)


def _choose(
    part: Tensor,
    num_chosen: int,
    normalize: bool,
    dtype: torch.dtype,
    scaled_TM: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    x_TM: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_slices, T, E = part.shape
    expert_TK = torch.empty((T, num_chosen), dtype=torch.int64, device=part.device)
    weight_TK = torch.empty((T, num_chosen), dtype=dtype, device=part.device)
    if T == 0:
        return expert_TK, weight_TK
    M, experts = 1 if x_TM is None else x_TM.shape[1], triton.next_power_of_2(E)
    with torch.cuda.device_of(part):
        _choose_kernel[(T,)](
            part,
            scaled_TM,
            squares,
            expert_TK,
            weight_TK,
            x_TM,
            T,
            0 if squares is None else len(squares),
            eps,
            M=M,
            E=E,
            CHOSEN=num_chosen,
            NORMALIZE=normalize,
            SLICES=num_slices,
            PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
            EXPERTS=experts,
            OTHERS=min(experts, RANK_TABLE // experts),
            BLOCK=triton.next_power_of_2(M),
            num_warps=4 if E <= 128 else 8,
            **overlap(part),
        )
    return expert_TK, weight_TK


@triton.jit(do_not_specialize=["T"])
def _router_kernel(
    x_ptr,
    router_ptr,
    part_ptr,
    T,
    M: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Some experts' products with all rows, over a slice of the depth."""
    slice = tl.program_id(0)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.arange(0, TOKENS)
    depth = slice * DEPTH + tl.arange(0, DEPTH)
    is_expert, is_token, is_deep = (expert < E)[:, None], token < T, (depth < M)[None]
    router = tl.load(router_ptr + expert[:, None] * M + depth[None], mask=is_expert & is_deep, other=0.0)
    wait(OVERLAP)
    x = tl.load(x_ptr + token[:, None] * M + depth[None], mask=is_token[:, None] & is_deep, other=0.0)
    product = tl.dot(router, x.T, input_precision="ieee")
    place = (slice * T + token)[None] * E + expert[:, None]
    tl.store(part_ptr + place, product, mask=is_expert & is_token[None])


@triton.jit(do_not_specialize=["T", "num_parts"])
def _choose_kernel(
    part_ptr,
    scaled_ptr,
    squares_ptr,
    expert_ptr,
    weight_ptr,
    x_ptr,
    T,
    num_parts,
    eps,
    M: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """The choices of one row, and the row divided, if its norm is not finished.

    An expert's rank is the number of those that are better, which needs no sorting, only a table of all pairs. What is
    not a number counts as the worst, so that every rank is taken.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < E
    wait(OVERLAP)
    logit = tl.zeros([EXPERTS], tl.float32)
    for slice in tl.static_range(SLICES):
        logit += tl.load(part_ptr + (slice * T + token) * E + expert, mask=is_expert, other=0.0).to(tl.float32)
    if squares_ptr is not None:
        part, lane = tl.arange(0, PARTS), tl.arange(0, BLOCK)
        scaled = tl.load(scaled_ptr + token * M + lane, mask=lane < M, other=0.0).to(tl.float32)
        squares = tl.load(squares_ptr + part * T + token, mask=part < num_parts, other=0.0)
        divisor = tl.sqrt(tl.sum(squares) / M + eps)
        tl.store(x_ptr + token * M + lane, scaled / divisor, mask=lane < M)
        logit = (logit / divisor).to(weight_ptr.dtype.element_ty).to(tl.float32)  # as narrow as any product

    worth = tl.where(is_expert & (logit == logit), logit, -float("inf"))
    rank = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, EXPERTS, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_worth = tl.gather(worth, other, 0)[:, None]
        before = (other_worth == worth[None]) & (other[:, None] < expert[None])
        rank += tl.sum(((other_worth > worth[None]) | before).to(tl.int32), 0)
    chance = tl.where(is_expert, tl.exp(logit - tl.max(worth)), 0.0)
    is_chosen = rank < CHOSEN
    weight = chance / tl.sum(tl.where(is_chosen, chance, 0.0) if NORMALIZE else chance)
    place = token * CHOSEN + rank
    tl.store(expert_ptr + place, expert, mask=is_chosen)
    tl.store(weight_ptr + place, weight, mask=is_chosen)
