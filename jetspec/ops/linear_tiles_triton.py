"""Operands of the tiled linear kernels, which differ in how they load data, not in what they compute.

A norm is spread over two products, so that it needs no kernel of its own: the product that writes the residual stream
scales it by the norm's weight and sums the squares of its part of each row, and the product that reads it divides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from jetspec.ops.buffers import new_rows
from jetspec.ops.layouts import Residual
from jetspec.ops.norm_rope import rms_norm


@dataclass(frozen=True)
class Epilogue:
    """Operations fused with a product y = x W^T, in order: divide, add the bias, gate, add to the residual stream."""

    bias: Tensor | None = None
    gated: bool = False
    """silu(gate) * up, where the weight holds the rows of the gate first."""
    squares: Tensor | None = None
    """(parts, T): sums of squares of the input rows, which are divided by their root mean square."""
    eps: float = 0.0
    total: Tensor | None = None
    """The residual stream (T, N)."""
    next_norm: Tensor | None = None
    scaled: Tensor | None = None
    """Output: the sum times `next_norm`."""
    next_squares: Tensor | None = None
    """Output: (programs, T) sums of squares of the sum."""
    tap: Tensor | None = None
    """A second output of the sum, whose rows may be far apart."""

    def operands(self, out: Tensor) -> tuple[Tensor | None, ...]:
        """Pointers of every kernel, in order."""
        read = self.bias, self.squares, self.total
        return *read, out, self.next_norm, self.scaled, self.next_squares, self.tap

    def sizes(self, out: Tensor) -> tuple[int | float, ...]:
        """T, N, num_parts, tap_stride, eps."""
        num_parts = 0 if self.squares is None else len(self.squares)
        return *out.shape, num_parts, 0 if self.tap is None else self.tap.stride(0), self.eps

    @property
    def parts(self) -> int:
        """Sums of squares per row, rounded up to a power of two."""
        return 1 if self.squares is None else triton.next_power_of_2(len(self.squares))


@dataclass(frozen=True)
class TiledLinear:
    """The products of a layer by one kernel, with the signatures of `linear.py`."""

    plan: Callable[[Tensor, Tensor, int, bool, bool], Any]
    """Returns block sizes for x, the weight, the number of outputs, a gate, an addition; `width` is the outputs of a
    program."""
    launch: Callable[[Any, Tensor, Tensor, Tensor, Epilogue], None]
    """Runs the kernel with tiles, x, the weight, the output and the epilogue."""

    def linear(self, x_TK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x_TK, weight, Epilogue(bias))

    def norm_linear(
        self, residual: Residual, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
    ) -> Tensor:
        x_TK = rms_norm(residual.x, norm, eps) if residual.scaled is None else residual.scaled
        return self._product(x_TK, weight, Epilogue(bias, gated, residual.squares, eps))

    def add_linear(
        self, total_TN: Tensor, x_TK: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor, tap: Tensor | None
    ) -> Residual:
        (T, N), tiles = total_TN.shape, self.plan(x_TK, weight, len(weight), False, True)
        scaled = new_rows(T, N, like=total_TN)
        squares = torch.empty((-(-N // tiles.width), T), dtype=torch.float32, device=total_TN.device)
        epilogue = Epilogue(bias, total=total_TN, next_norm=next_norm, scaled=scaled, next_squares=squares, tap=tap)
        self.launch(tiles, x_TK, weight, total_TN, epilogue)
        return Residual(total_TN, scaled, squares)

    def _product(self, x_TK: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
        N = len(weight) // (2 if epilogue.gated else 1)
        out = new_rows(len(x_TK), N, like=x_TK)
        self.launch(self.plan(x_TK, weight, N, epilogue.gated, False), x_TK, weight, out, epilogue)
        return out
