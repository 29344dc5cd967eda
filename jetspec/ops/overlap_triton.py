"""Kernels that start while the one before them ends: Hopper's programmatic dependent launch.

A round launches hundreds of short kernels, each waiting for the last program of the one before it. A kernel that takes
part may be launched as soon as all programs of its predecessor have begun, do what needs none of its results, such as
reading weights and lengths, and must then `wait` for it. Every program waits, before anything else could end it: a
kernel that was over before its predecessor would let its successor read what is not yet written.

What was written may be read before the wait only if a kernel that takes no part was launched since: it starts when all
before it is over and seen by all. The end of a kernel alone, without a wait, promises nobody what it wrote.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.select import enabled


def overlap(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that takes part, where the device of `x` can."""
    return {"OVERLAP": True, "launch_pdl": True} if enabled("overlap", x.device) else {"OVERLAP": False}


@triton.jit
def fetch(ptr, num_bytes):
    """Ask for what lies at `ptr`, each thread of a program for a part, so that it is in the cache when it is loaded.
    Both numbers are multiples of 16."""
    threads: tl.constexpr = tl.extra.cuda.num_threads()
    share = tl.cdiv(num_bytes, threads * 16) * 16
    first = tl.arange(0, threads) * share
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.pointer_type(tl.int8)) + first, tl.minimum(share, num_bytes - first)],
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
