"""A mixture of SwiGLU experts: every token visits the few experts that its router chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops.layouts import Residual, Routed, copied
from jetspec.ops.linear import linear
from jetspec.ops.norm_rope import rms_norm, swiglu_reference
from jetspec.ops.select import operation, select


def norm_route(
    residual: Residual, norm: Tensor, eps: float, router: Tensor, num_chosen: int, normalize: bool = True
) -> Routed:
    """`rms_norm`, and the best experts of each row: the start of a sparse MLP. `router` is (experts, M).

    Weights are probabilities over all experts, computed in fp32, and scaled to sum to 1 if `normalize`. Of experts that
    tie the lowest comes first.
    """
    x_TM = rms_norm(residual.x, norm, eps).flatten(0, -2)
    return Routed(x_TM, *route(linear(x_TM, router), num_chosen, normalize, x_TM.dtype))


@operation(lambda logits_TE, *_: (logits_TE,))
def route(logits_TE: Tensor, num_chosen: int, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The experts (T, K) that each row chooses, and their weights."""
    expert_TK = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weight_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(-1, expert_TK)
    if normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK, weight_TK.to(dtype)


def add_mixture(total: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, tap: Tensor | None = None) -> Residual:
    """total + the sum over a token's experts of weight * expert(x): the end of a sparse MLP.

    `gate_up` is (experts, 2 * inner, M), `down` is (experts, M, inner). The result may overwrite `total`; it is copied
    to `tap`.
    """
    inputs = total, routed.x_TM, gate_up, down, routed.weight_TK
    return select("add_mixture", add_mixture_reference, *inputs)(total, routed, gate_up, down, tap)


def add_mixture_reference(total: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, tap: Tensor | None) -> Residual:
    """One expert after the other. Reads the chosen experts on the host."""
    x_TM, expert_TK, weight_TK = routed
    out = torch.zeros_like(x_TM)
    for expert in expert_TK.unique().tolist():
        token, choice = torch.where(expert_TK == expert)
        y = F.linear(swiglu_reference(F.linear(x_TM[token], gate_up[expert])), down[expert])
        out.index_add_(0, token, y * weight_TK[token, choice, None])
    return copied(Residual(total + out.view_as(total)), tap)
