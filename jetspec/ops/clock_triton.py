"""Triton kernel of `note_time`. It starts when all earlier kernels have finished."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def note_time_triton(time_S: Tensor, count_1: Tensor) -> None:
    with torch.cuda.device_of(time_S):
        _note_time_kernel[(1,)](time_S, count_1, len(time_S), num_warps=1)


@triton.jit(do_not_specialize=["size"])
def _note_time_kernel(time_ptr, count_ptr, size):
    count = tl.load(count_ptr)
    tl.store(time_ptr + count % size, tl.extra.cuda.globaltimer())
    tl.store(count_ptr, count + 1)
