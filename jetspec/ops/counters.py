"""Numbers by which the programs of a kernel count each other. They are zeros before it and zeros after it, so that all
kernels share them that run one after the other: all that use them run on one stream of a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

COUNT = 4096


@cache
def counters(device: torch.device) -> Tensor:
    return torch.zeros(COUNT, dtype=torch.int32, device=device)
