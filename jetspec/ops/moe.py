"""A mixture of SwiGLU experts: every token visits the few experts that its router chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mixture(x_TM: Tensor, gate_up: Tensor, down: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Sum over a token's experts of weight * expert(x).

    `gate_up` is (experts, 2 * inner, M), `down` is (experts, M, inner).
    """
    out = torch.zeros_like(x_TM)
    for expert in expert_TK.unique().tolist():
        token, choice = torch.where(expert_TK == expert)
        gate, up = F.linear(x_TM[token], gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, y * weight_TK[token, choice, None])
    return out
