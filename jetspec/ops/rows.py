"""Padding of row buffers to whole tiles, which the copy engine (TMA) reads faster than tiles with an end inside.

Past the end of a matrix the engine fills in zeros, which takes longer than to read. So buffers are padded to a tile
multiple, and tiled reads include the padding. Its contents are arbitrary: each row of a product depends on its own row
alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
MAX_ROWS = 128
"""More rows are read in several tiles, most of which are whole."""


def new_rows(rows: int, *sizes: int, like: Tensor) -> Tensor:
    """Returns uninitialized rows with the type and device of `like`, padded to whole tiles on a GPU."""
    padded = rows + -rows % TILE if like.is_cuda and 1 < rows <= MAX_ROWS else rows
    return torch.empty((padded, *sizes), dtype=like.dtype, device=like.device)[:rows]


def whole_tiles(x_TK: Tensor, tile: int) -> Tensor:
    """Returns the rows with the memory behind them, up to the end of a tile or of their storage."""
    T, K = x_TK.shape
    available = (x_TK.untyped_storage().nbytes() // x_TK.itemsize - x_TK.storage_offset()) // K
    return x_TK.as_strided((min(T + -T % tile, available), K), (K, 1))
