"""A mixture of SwiGLU experts: every token visits the few experts that its router chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.dispatch import uses_kernel
from jetspec.ops.swiglu import swiglu_reference


def mixture(x_TM: Tensor, gate_up: Tensor, down: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Sum over a token's experts of weight * expert(x).

    `gate_up` is (experts, 2 * inner, M), `down` is (experts, M, inner).
    """
    if uses_kernel(x_TM, gate_up, down, weight_TK) and x_TM.dtype == gate_up.dtype:
        from jetspec.ops.moe_triton import mixture_triton

        return mixture_triton(x_TM, gate_up, down, expert_TK, weight_TK)
    return mixture_reference(x_TM, gate_up, down, expert_TK, weight_TK)


def mixture_reference(x_TM: Tensor, gate_up: Tensor, down: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """One expert after the other, which asks the device which ones were chosen."""
    out = torch.zeros_like(x_TM)
    for expert in expert_TK.unique().tolist():
        token, choice = torch.where(expert_TK == expert)
        y = F.linear(swiglu_reference(F.linear(x_TM[token], gate_up[expert])), down[expert])
        out.index_add_(0, token, y * weight_TK[token, choice, None])
    return out
