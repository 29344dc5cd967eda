"""SwiGLU: the gated activation of an MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from jetspec.ops.select import select


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., I), for (..., 2I) with the gate first.

    The kernel rounds only the product, the reference also silu(gate): in bf16 they differ by one rounding.
    """
    return select("swiglu", swiglu_reference, gate_up)(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
