"""Triton kernels of `transfer`. Copies are from device memory to pinned host memory, both flat and contiguous."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import launch

BLOCK = 1024


def copy_to_host_triton(source: Tensor, target: Tensor) -> None:
    size, source = source.numel(), source.contiguous()
    assert target.is_contiguous() and target.shape == source.shape and target.dtype == source.dtype
    launch(_copy_to_host_kernel, (triton.cdiv(size, BLOCK),), source, target, size, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["size"])
def _copy_to_host_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < size), mask=i < size)


def note_time_triton(time_S: Tensor, count_1: Tensor) -> None:
    """It starts when all earlier kernels have finished."""
    launch(_note_time_kernel, (1,), time_S, count_1, len(time_S), num_warps=1)


@triton.jit(do_not_specialize=["size"])
def _note_time_kernel(time_ptr, count_ptr, size):
    count = tl.load(count_ptr)
    tl.store(time_ptr + count % size, tl.extra.cuda.globaltimer())
    tl.store(count_ptr, count + 1)
