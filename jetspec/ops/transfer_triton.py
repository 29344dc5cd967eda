"""Triton kernel of `copy_to_host`: device memory to pinned host memory, both flat and contiguous."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def copy_to_host_triton(source: Tensor, target: Tensor) -> None:
    size, source = source.numel(), source.contiguous()
    assert target.is_contiguous()
    with torch.cuda.device_of(source):
        _copy_to_host_kernel[(triton.cdiv(size, BLOCK),)](source, target, size, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["size"])
def _copy_to_host_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < size), mask=i < size)
