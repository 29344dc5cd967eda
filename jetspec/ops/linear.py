"""Matrix products of a layer, with what stands before or after them. Weights are (outputs, inputs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.dispatch import uses_kernel
from jetspec.ops.norm_rope import rms_norm
from jetspec.ops.swiglu import swiglu

FEW_ROWS = range(5, 17)
SOME_ROWS = range(2, 33)

HAS_MKL_PACKING = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    if _is_vector(x, weight):
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(x, weight, bias)
    return linear_reference(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of `rms_norm`: the start of attention."""
    if _is_vector(x, weight, norm):
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(x, weight, bias, norm=norm, eps=eps)
    return linear_reference(rms_norm(x, norm, eps), weight, bias)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu` of `norm_linear`: the start of an MLP. `weight` holds the rows of the gate, then those of the rest."""
    if _is_vector(x, weight, norm):
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(x, weight, bias, norm=norm, eps=eps, gated=True)
    return swiglu(linear_reference(rms_norm(x, norm, eps), weight, bias))


def add_linear(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """total + x W^T + b: the end of attention and of an MLP. The result may take the memory of `total`."""
    if _is_vector(x, weight, total):
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(x, weight, bias, total=total)
    if uses_kernel(x, weight, total) and x.dtype == weight.dtype == total.dtype and x.dim() == 2:
        total = total if bias is None else total.add_(bias)
        return total.addmm_(x, weight.t())
    return total + linear_reference(x, weight, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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


def _is_vector(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """A single row on a GPU: then a product does nothing but read its weight, and all around it costs as much."""
    same = all(y.dtype == x.dtype for y in (weight, *others))
    return x.numel() == x.shape[-1] and same and weight.is_contiguous() and uses_kernel(x, weight, *others)


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
