"""Counters in global memory by which the programs of a kernel synchronize. Kernels that run one after the other on one
stream of a device share them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

COUNT = 4096
MAX_BARRIER_PROGRAMS = 32
"""Programs of a grid barrier, at most. A power of two, so that multiples of it stay multiples when a counter
overflows."""


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)


@cache
def barrier_counters(device: torch.device) -> Tensor:
    """Multiples of `MAX_BARRIER_PROGRAMS` before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)
