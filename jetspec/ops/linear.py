"""y = x W^T + b."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = range(5, 17)
SOME_ROWS = range(2, 33)

HAS_MKL_PACKING = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`, and faster on a CPU for the row counts of a verify pass.

    CPU libraries rearrange the weight in every product, which many rows pay for and a handful do not. So frozen
    weights are rearranged once, at the price of a second copy, and rows are padded to the count that it serves.
    Otherwise the weight becomes the left factor, so that its long side is the one that is tiled.
    """
    rows = x.shape[0]
    if rows not in SOME_ROWS or x.dim() != 2 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    packs = rows in FEW_ROWS and can_pack(weight)
    y = _packed_product(x, weight) if packs else torch.mm(weight, x.t()).t()
    return y if bias is None else y + bias


def can_pack(weight: Tensor) -> bool:
    """Only what never changes: a frozen parameter. A slice of one would be packed anew each time."""
    frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
    return HAS_MKL_PACKING and frozen and weight.dtype == torch.float32


def pack(weight: Tensor) -> None:
    """Rearrange a weight ahead of its first product, if it is one that is rearranged at all."""
    if weight.device.type == "cpu" and can_pack(weight):
        _packed(weight)


def _packed(weight: Tensor) -> Tensor:
    """Kept on the parameter, so that both live equally long."""
    if not hasattr(weight, "packed"):
        weight.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, FEW_ROWS[-1])  # type: ignore[attr-defined]
    return weight.packed  # type: ignore[attr-defined]


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    rows = FEW_ROWS[-1]
    padded = F.pad(x, (0, 0, 0, rows - len(x)))
    return torch.ops.mkl._mkl_linear(padded, _packed(weight), weight, None, rows)[: len(x)]
