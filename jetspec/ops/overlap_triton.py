"""Programmatic dependent launch of Hopper: a kernel starts while the previous one ends.

A round launches hundreds of short kernels, each of which waits for the last program of the previous one. A kernel that
takes part may start as soon as all programs of its predecessor have begun. It may do work that needs none of its
results, such as loading weights and lengths, and must then `wait` for it. Every program waits before it can end: if a
kernel ended before its predecessor, its successor would read memory that is not yet written.

Data may be read before the wait only if a kernel that takes no part was launched since it was written: that kernel
starts when all earlier ones have ended, with their stores visible. The end of a kernel without a wait guarantees
neither.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from jetspec.ops.select import enabled

# Stands for no logit, and for the highest one before any is seen. Finite: the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs a kernel on the device of its first tensor. It takes part if it has a constant OVERLAP, which is not given,
    and the device can."""
    x = next(arg for group in args for arg in (group if isinstance(group, tuple) else (group,)) if torch.is_tensor(arg))
    if "OVERLAP" in kernel.arg_names and "OVERLAP" not in options:
        options |= {"OVERLAP": True, "launch_pdl": True} if enabled("overlap", x.device) else {"OVERLAP": False}
    with torch.cuda.device_of(x):
        kernel[grid](*args, **options)


@triton.jit
def fetch(ptr, num_bytes):
    """Prefetches memory at `ptr` into the L2 cache, each thread a share. Address and size are multiples of 16."""
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
    """Waits for the previous kernel to finish. The next one may start meanwhile, and waits in turn."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
