"""Memory for rows of which a copy engine reads whole tiles.

Where a tile goes on behind the last row of a matrix, the engine fills in zeros, and that takes it longer than to read.
So rows are given room behind them, and whoever reads them in tiles reads that, too. What lies there is anything: each
row of a product depends on its own row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
MOST_ROWS = 128
"""More are read in several tiles, most of which are whole."""


def new_rows(rows: int, *sizes: int, like: Tensor) -> Tensor:
    """Rows of any contents, of the kind of `like`, with room up to the end of a tile."""
    room = rows + -rows % TILE if like.is_cuda and 1 < rows <= MOST_ROWS else rows
    return torch.empty((room, *sizes), dtype=like.dtype, device=like.device)[:rows]


def whole_tiles(x_TK: Tensor, tile: int) -> Tensor:
    """Rows and what lies behind them, up to the end of a tile, or of their memory."""
    T, K = x_TK.shape
    there = (x_TK.untyped_storage().nbytes() // x_TK.itemsize - x_TK.storage_offset()) // K
    return x_TK.as_strided((min(T + -T % tile, there), K), (K, 1))
