"""A mixture of SwiGLU experts: every token visits the few experts that its router chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops.layouts import Residual
from jetspec.ops.linear import FEW_ROWS_OF_A_GPU, begins_norm, copied, linear
from jetspec.ops.norm_rope import rms_norm
from jetspec.ops.select import uses_kernel
from jetspec.ops.swiglu import swiglu_reference


class Routed(NamedTuple):
    """What experts are given. Tokens are rows, whatever shape they had; K choices each, the best first."""

    x_TM: Tensor
    expert_TK: Tensor
    weight_TK: Tensor


def norm_route(
    residual: Residual, norm: Tensor, eps: float, router: Tensor, num_chosen: int, normalize: bool = True
) -> Routed:
    """`rms_norm`, and the best experts of each row: the start of a sparse MLP. `router` is (experts, M).

    Weights are probabilities over all experts, in fp32 until the end, scaled to sum to 1 if they are to `normalize`.
    Of experts that tie the lowest comes first.
    """
    if len(residual.x) in FEW_ROWS_OF_A_GPU and residual.scaled is not None and residual.squares is not None:
        from jetspec.ops.route_triton import norm_route_triton

        return Routed(*norm_route_triton(residual.scaled, residual.squares, eps, router, num_chosen, normalize))
    x_TM = rms_norm(residual.x, norm, eps).flatten(0, -2)
    return Routed(x_TM, *route(linear(x_TM, router), num_chosen, normalize, x_TM.dtype))


def route(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The experts (T, K) that each row chooses, and their weights."""
    if uses_kernel(logits_TE):
        from jetspec.ops.route_triton import route_triton

        return route_triton(logits_TE, num_chosen, normalize, dtype)
    return route_reference(logits_TE, num_chosen, normalize, dtype)


def route_reference(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    expert_TK = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weight_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(-1, expert_TK)
    if normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK, weight_TK.to(dtype)


def add_mixture(
    total: Tensor,
    routed: Routed,
    gate_up: Tensor,
    down: Tensor,
    next_norm: Tensor | None = None,
    tap: Tensor | None = None,
) -> Residual:
    """total + the sum over a token's experts of weight * expert(x): the end of a sparse MLP.

    `gate_up` is (experts, 2 * inner, M), `down` is (experts, M, inner). The result may take the memory of `total`; it
    is copied to `tap`, and `next_norm` is begun, as by `add_linear`.
    """
    x_TM, expert_TK, weight_TK = routed
    same = total.dtype == x_TM.dtype == gate_up.dtype and total.shape == x_TM.shape and total.is_contiguous()
    if same and uses_kernel(total, x_TM, gate_up, down, weight_TK):
        from jetspec.ops.moe_triton import add_mixture_triton

        begins = next_norm is not None and len(total) in FEW_ROWS_OF_A_GPU and begins_norm(total, next_norm)
        begun = next_norm if begins else None
        return Residual(total, *add_mixture_triton(total, x_TM, expert_TK, weight_TK, gate_up, down, begun, tap))
    return copied(Residual(total + mixture_reference(routed, gate_up, down).view_as(total)), tap)


def mixture_reference(routed: Routed, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert after the other, which asks the device which ones were chosen."""
    x_TM, expert_TK, weight_TK = routed
    out = torch.zeros_like(x_TM)
    for expert in expert_TK.unique().tolist():
        token, choice = torch.where(expert_TK == expert)
        y = F.linear(swiglu_reference(F.linear(x_TM[token], gate_up[expert])), down[expert])
        out.index_add_(0, token, y * weight_TK[token, choice, None])
    return out
