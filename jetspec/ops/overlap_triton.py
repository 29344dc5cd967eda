"""Two ways to keep the memory busy between products: Hopper's programmatic dependent launch, and fetching ahead.

A round launches hundreds of short kernels, each waiting for the last program of the one before it. A kernel that takes
part may be launched as soon as all programs of its predecessor have begun, do what needs none of its results, such as
reading weights, and must then `wait` for it. Every program waits, before anything else could end it: a kernel that was
over before its predecessor would let its successor read what is not yet written.

A round lasts as long as its weights are read, and kernels that read none let the memory rest. So these ask for the
first part of every row of the weight that comes next: it is on its way to the cache while they compute.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AHEAD_BYTES = 16 << 20
"""Of a weight: less than the cache holds, since a product streams through it, too."""
LANES = tl.constexpr(128)


def overlap(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that takes part, where the device of `x` can."""
    return _overlap(x.device)


@cache
def _overlap(device: torch.device) -> dict[str, Any]:
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


def fetching(x: Tensor, weight: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel that fetches a weight (outputs, inputs) ahead, where the device of `x` can."""
    if weight is None or not _overlap(x.device)["OVERLAP"] or not weight.is_contiguous():
        return {"ahead_ptr": None, "AHEAD": None}
    rows, stride = len(weight), weight.nbytes // len(weight)
    part = min(stride, AHEAD_BYTES // rows) // 16 * 16
    return {"ahead_ptr": weight, "AHEAD": (rows, stride, part) if part and stride % 16 == 0 else None}


@triton.jit
def fetch(ahead_ptr, AHEAD: tl.constexpr):
    """This program's share of a weight's rows: how many there are, the bytes from one to the next, and those wanted."""
    if AHEAD is not None:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        programs = tl.num_programs(0) * tl.num_programs(1)
        for first in range(program * LANES, AHEAD[0], programs * LANES):
            row = first + tl.arange(0, LANES)
            address = ahead_ptr.to(tl.int64) + tl.minimum(row, AHEAD[0] - 1).to(tl.int64) * AHEAD[1]
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
                "=r,l,r,r",
                [address, (row < AHEAD[0]).to(tl.int32), tl.full([LANES], AHEAD[2], tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel before has finished. The one behind may be launched meanwhile, and waits in turn."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
