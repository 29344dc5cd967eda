"""Matrix products of a layer, with what stands before or after them. Weights are (outputs, inputs).

On a GPU it depends on the number of rows, and on whether a cache holds the weight (`is_small`), who multiplies:

    rows          a small weight         a large weight
    1             vector_linear_triton   vector_linear_triton
    2 to 64       rows_linear_triton     rows_linear_triton
    65 to 128     rows_linear_triton     piped_linear_gluon, on Hopper
    129 to 1024   piped_linear_gluon     the library
    more          the library            the library

The library has the rest, too: what the copy engine cannot read, and all where there is none or tensor cores have no
queue. On a CPU it is the library, for a few rows with a weight that was rearranged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.ops.layouts import Residual
from jetspec.ops.norm_rope import rms_norm
from jetspec.ops.select import uses_kernel
from jetspec.ops.swiglu import swiglu

if TYPE_CHECKING:
    from jetspec.ops.linear_piped_gluon import Pipe

PACKED_ROWS_OF_A_CPU = range(5, 17)
ROWS_OF_A_CPU = range(2, 33)
"""For which there is something faster than the library's own way."""
FEW_ROWS_OF_A_GPU = range(2, 65)
"""More of them would be read too often: a library passes them on between multiprocessors."""
SOME_ROWS_OF_HOPPER = range(65, 129)
"""For which ours reads a large weight as fast as a library does, and does what stands around the product, too."""
ROWS_OF_A_SMALL_WEIGHT = range(2, 129)
"""On a GPU. How often these are read does not matter, but how many kernels a layer has."""
MANY_ROWS_OF_A_SMALL_WEIGHT = range(129, 1025)
"""On Hopper, likewise."""
MANY_OUTPUTS = 32_768
"""Of a product without anything around it: more keep a library busy long enough that how it starts does not matter."""

HAS_MKL_PACKING = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    rows = _rows(x, weight)
    if rows == "one":
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(x, weight, bias)
    if rows == "few" and len(weight) <= MANY_OUTPUTS:
        from jetspec.ops.linear_triton import rows_linear_triton

        return rows_linear_triton(x, weight, bias)
    return linear_reference(x, weight, bias)


def norm_linear(residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of `rms_norm`: the start of attention."""
    rows = _rows(residual.x, weight, norm)
    if rows == "one":
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(residual.x, weight, bias, norm=norm, eps=eps)
    if rows == "few" and residual.scaled is not None and residual.squares is not None:
        from jetspec.ops.linear_triton import rows_linear_triton

        return rows_linear_triton(residual.scaled, weight, bias, squares=residual.squares, eps=eps)
    if (
        rows == "many"
        and residual.scaled is not None
        and (pipe := _find_pipe(residual.x, weight, len(weight))) is not None
    ):
        from jetspec.ops.linear_piped_gluon import piped_linear_gluon

        return piped_linear_gluon(pipe, residual.scaled, weight, bias, squares=residual.squares, eps=eps)
    return linear(rms_norm(residual.x, norm, eps), weight, bias)


def norm_swiglu(residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu` of `norm_linear`: the start of an MLP. `weight` holds the rows of the gate, then those of the rest."""
    rows = _rows(residual.x, weight, norm)
    if rows == "one":
        from jetspec.ops.linear_triton import vector_linear_triton

        return vector_linear_triton(residual.x, weight, bias, norm=norm, eps=eps, gated=True)
    if rows == "few" and residual.scaled is not None and residual.squares is not None:
        from jetspec.ops.linear_triton import rows_linear_triton

        return rows_linear_triton(residual.scaled, weight, bias, squares=residual.squares, eps=eps, gated=True)
    if rows == "many" and (pipe := _find_pipe(residual.x, weight, len(weight) // 2)) is not None:
        from jetspec.ops.linear_piped_gluon import piped_linear_gluon

        x = rms_norm(residual.x, norm, eps) if residual.scaled is None else residual.scaled
        return piped_linear_gluon(pipe, x, weight, bias, squares=residual.squares, eps=eps, gated=True)
    return swiglu(linear(rms_norm(residual.x, norm, eps), weight, bias))


def add_linear(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    next_norm: Tensor | None = None,
    tap: Tensor | None = None,
) -> Residual:
    """total + x W^T + b: the end of attention and of an MLP. The result may take the memory of `total`, and is copied
    to `tap`.

    `next_norm` is the weight of the norm by which the stream will be read: where that saves a kernel, it is begun.
    """
    rows = _rows(x, weight, total)
    if rows == "one":
        from jetspec.ops.linear_triton import vector_linear_triton

        return copied(Residual(vector_linear_triton(x, weight, bias, total=total)), tap)
    if rows == "few" and next_norm is not None and begins_norm(total, next_norm):
        from jetspec.ops.linear_triton import rows_add_linear_triton

        return Residual(total, *rows_add_linear_triton(total, x, weight, bias, next_norm, tap))
    if rows == "many" and next_norm is not None and begins_norm(total, next_norm):
        pipe = _find_pipe(x, weight, len(weight), weight.shape[1])
        if pipe is not None and x.dtype == total.dtype:
            from jetspec.ops.linear_piped_gluon import piped_add_linear_gluon

            return Residual(total, *piped_add_linear_gluon(pipe, total, x, weight, bias, next_norm, tap))
    if uses_kernel(x, weight, total) and x.dtype == weight.dtype == total.dtype and total.is_contiguous():
        total = total if bias is None else total.add_(bias)
        total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return copied(Residual(total), tap)
    return copied(Residual(total + linear_reference(x, weight, bias)), tap)


def copied(residual: Residual, tap: Tensor | None) -> Residual:
    if tap is not None:
        tap.copy_(residual.x)
    return residual


def begins_norm(total: Tensor, next_norm: Tensor) -> bool:
    """Whether the products that read a few rows of a stream can finish a norm that its writer has begun. Not in
    float16, whose numbers end where those of a stream that is not divided yet may go on."""
    if not uses_kernel(total, next_norm) or total.dtype == torch.float16 or total.dtype != next_norm.dtype:
        return False
    from jetspec.ops.linear_triton import can_copy, has_copy_engine

    return can_copy(total) and has_copy_engine(total)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`, and faster on a CPU for the row counts of a verify pass.

    CPU libraries rearrange the weight in every product, which many rows pay for and a handful do not. So frozen
    weights are rearranged once, at the price of a second copy, and rows are padded to the count that it serves.
    Otherwise the weight becomes the left factor, so that its long side is the one that is tiled.
    """
    rows = x.shape[0]
    if rows not in ROWS_OF_A_CPU or x.dim() != 2 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    packs = rows in PACKED_ROWS_OF_A_CPU and can_pack(weight)
    y = _packed_product(x, weight) if packs else torch.mm(weight, x.t()).t()
    return y if bias is None else y + bias


def _rows(x: Tensor, weight: Tensor, *others: Tensor) -> Literal["one", "few", "many"]:
    """Whether there are so few rows that a product does nothing but read its weight, and all around it would cost as
    much. "many" also where no kernel of ours takes so few of them."""
    same = all(y.dtype == x.dtype for y in (weight, *others))
    if not (same and weight.is_contiguous() and uses_kernel(x, weight, *others)):
        return "many"
    if x.numel() == x.shape[-1]:
        return "one"
    from jetspec.ops.linear_triton import can_copy, has_copy_engine, is_small

    can = can_copy(x) and can_copy(weight) and all(y.is_contiguous() for y in others) and has_copy_engine(x)
    few = ROWS_OF_A_SMALL_WEIGHT if is_small(weight) else FEW_ROWS_OF_A_GPU
    return "few" if can and len(x) in few else "many"


def _find_pipe(x: Tensor, weight: Tensor, outputs: int, depth: int = 0) -> Pipe | None:
    """Block sizes of a product of many rows, or of some with a large weight, where its kernel serves it: tensor cores
    have a queue as Hopper's do, which later ones do not. Programs may share `depth` inputs."""
    if not x.is_cuda or x.itemsize != 2 or x.dtype != weight.dtype or not uses_kernel(x, weight):
        return None
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return None
    from jetspec.ops.linear_piped_gluon import find_pipe, find_small_pipe
    from jetspec.ops.linear_triton import can_copy, is_small

    if not (can_copy(x) and can_copy(weight)):
        return None
    if is_small(weight):
        return find_small_pipe(outputs, len(x)) if len(x) in MANY_ROWS_OF_A_SMALL_WEIGHT else None
    return find_pipe(outputs, depth) if len(x) in SOME_ROWS_OF_HOPPER else None


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
        weight.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS_OF_A_CPU[-1])  # type: ignore[attr-defined]
    return weight.packed  # type: ignore[attr-defined]


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    rows = PACKED_ROWS_OF_A_CPU[-1]
    padded = F.pad(x, (0, 0, 0, rows - len(x)))
    return torch.ops.mkl._mkl_linear(padded, _packed(weight), weight, None, rows)[: len(x)]
