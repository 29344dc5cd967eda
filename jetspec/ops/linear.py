"""Matrix products of a layer, fused with the norm, gate or addition around them. Weights are (outputs, inputs).

`select.py` says which kernel serves which number of rows and size of weight. All other products are the library's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.ops.layouts import Residual, copied
from jetspec.ops.norm_rope import rms_norm, swiglu
from jetspec.ops.select import select

PACKED_ROWS_OF_A_CPU = range(5, 17)
ROWS_OF_A_CPU = range(2, 33)
"""Rows for which another form of the product is faster than `F.linear`."""

HAS_MKL_PACKING = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    return select("linear", linear_reference, x, weight)(x, weight, bias)


def norm_linear(
    residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """`linear` of `rms_norm`: the start of attention, or, `gated`, that of an MLP."""
    is_begun = residual.scaled is not None
    kernel = select("norm_linear", norm_linear_reference, residual.x, weight, norm, gated=gated, is_begun=is_begun)
    return kernel(residual, norm, eps, weight, bias, gated)


def norm_linear_reference(
    residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:
    """Three operations, each of which may have a kernel."""
    y = linear(rms_norm(residual.x, norm, eps), weight, bias)
    return swiglu(y) if gated else y


def norm_swiglu(residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu` of `norm_linear`: the start of an MLP. `weight` holds the rows of the gate first."""
    return norm_linear(residual, norm, eps, weight, bias, gated=True)


def add_linear(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    next_norm: Tensor | None = None,
    tap: Tensor | None = None,
) -> Residual:
    """total + x W^T + b: the end of attention and of an MLP. The result may overwrite `total`; it is copied to `tap`.

    `next_norm` is the weight of the norm that reads the result. A kernel may begin that norm: it scales the rows by the
    weight and sums their squares, and the next product divides.
    """
    kernel = select("add_linear", add_linear_reference, x, weight, total, next_norm=next_norm)
    return kernel(total, x, weight, bias, next_norm, tap)


def add_linear_reference(
    total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor | None, tap: Tensor | None
) -> Residual:
    return copied(Residual(total + linear_reference(x, weight, bias)), tap)


def add_linear_in_place(
    total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor | None, tap: Tensor | None
) -> Residual:
    """`add_linear` by the library, over the memory of `total`."""
    total = total if bias is None else total.add_(bias)
    total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    return copied(Residual(total), tap)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`, and faster on a CPU for the row counts of a verify pass.

    CPU libraries pack the weight in every product, which pays for many rows only. So frozen weights are packed once, at
    the price of a second copy, and rows are padded to the count that the packed form serves. Other weights become the
    left factor, so that their long side is tiled.
    """
    rows = x.shape[0]
    if rows not in ROWS_OF_A_CPU or x.dim() != 2 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    packs = rows in PACKED_ROWS_OF_A_CPU and can_pack(weight)
    y = _packed_product(x, weight) if packs else torch.mm(weight, x.t()).t()
    return y if bias is None else y + bias


def can_pack(weight: Tensor) -> bool:
    """Returns true for a frozen parameter. A slice of one would be packed anew each time."""
    frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
    return HAS_MKL_PACKING and frozen and weight.dtype == torch.float32


def pack(weight: Tensor) -> None:
    """Packs a weight ahead of its first product, if it can be packed."""
    if weight.device.type == "cpu" and can_pack(weight):
        _packed(weight)


def _packed(weight: Tensor) -> Tensor:
    """The packed form, stored on the parameter so that both live equally long."""
    if not hasattr(weight, "packed"):
        weight.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS_OF_A_CPU[-1])  # type: ignore[attr-defined]
    return weight.packed  # type: ignore[attr-defined]


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    rows = PACKED_ROWS_OF_A_CPU[-1]
    padded = F.pad(x, (0, 0, 0, rows - len(x)))
    return torch.ops.mkl._mkl_linear(padded, _packed(weight), weight, None, rows)[: len(x)]
