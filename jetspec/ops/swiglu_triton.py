"""Triton kernel of `swiglu`: rows (2I,) with the gate first to rows (I,), contiguous. Computes in fp32."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait
from jetspec.ops.rows import new_rows

BLOCK = 1024


def swiglu_triton(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    *lead, double = gate_up.shape
    out = new_rows(gate_up.numel() // double, double // 2, like=gate_up).view(*lead, double // 2)
    if rows := gate_up.numel() // double:
        grid = (rows, triton.cdiv(double // 2, BLOCK))
        _swiglu_kernel[grid](gate_up, out, INNER=double // 2, BLOCK=BLOCK, **overlap(gate_up))
    return out


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False):
    """One block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    wait(OVERLAP)
    gate = tl.load(gate_up_ptr + row * 2 * INNER + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * INNER + column, gate * tl.sigmoid(gate) * up, mask=inside)
