"""Numbers by which the programs of a kernel count each other. All kernels share them that run one after the other: all
that use them run on one stream of a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

COUNT = 4096
MOST = 32
"""Programs that meet, at most. A power of two, so that what is a multiple of it stays one when a counter overflows."""


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros before a kernel and zeros after it."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)


@cache
def barrier_counters(device: torch.device) -> Tensor:
    """Multiples of `MOST` before a kernel and after it."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)
