"""y = x W^T + b."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`.

    A verify pass multiplies a handful of rows with each matrix. CPU libraries tile for many rows and are slow
    there; with the weight as the left factor the long side is tiled instead, and the same product costs less.
    """
    if x.device.type == "cpu" and x.dim() == 2 and 1 < x.shape[0] <= FEW_ROWS:
        y = torch.mm(weight, x.t()).t()
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)
