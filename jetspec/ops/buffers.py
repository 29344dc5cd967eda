"""Buffers of kernels: rows padded to whole tiles, and counters in global memory.

Past the end of a matrix the copy engine (TMA) fills in zeros, which takes longer than to read. So buffers are padded to
a tile multiple, and tiled reads include the padding. Its contents are arbitrary: each row of a product depends on its
own row alone.

By counters the programs of a kernel synchronize. Kernels that run one after the other on one stream of a device share
them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

TILE = 64
MAX_ROWS = 128
"""More rows are read in several tiles, most of which are whole."""
COUNT = 4096
MAX_BARRIER_PROGRAMS = 32
"""Programs of a grid barrier, at most. A power of two, so that multiples of it stay multiples when a counter
overflows."""


def new_rows(rows: int, *sizes: int, like: Tensor) -> Tensor:
    """Returns uninitialized rows with the type and device of `like`, padded to whole tiles on a GPU."""
    padded = rows + -rows % TILE if like.is_cuda and 1 < rows <= MAX_ROWS else rows
    return torch.empty((padded, *sizes), dtype=like.dtype, device=like.device)[:rows]


def whole_tiles(x_TK: Tensor, tile: int) -> Tensor:
    """Returns the rows with the memory behind them, up to the end of a tile or of their storage."""
    T, K = x_TK.shape
    available = (x_TK.untyped_storage().nbytes() // x_TK.itemsize - x_TK.storage_offset()) // K
    return x_TK.as_strided((min(T + -T % tile, available), K), (K, 1))


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)


@cache
def barrier_counters(device: torch.device) -> Tensor:
    """Multiples of `MAX_BARRIER_PROGRAMS` before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)
