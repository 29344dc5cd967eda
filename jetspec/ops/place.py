"""Where the nodes of a batch of trees go: behind what each request has cached."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.layouts import Places
from jetspec.ops.select import select


def place(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Places:
    """Positions and slots of nodes, with the page tables and lengths of their requests' rows. Integers, int64."""
    return select("place", place_reference, page_RP)(page_RP, length_R, row_B, depth_BN, page_size)


def place_reference(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Places:
    page_BP, length_B = page_RP[row_B], length_R[row_B]
    index_BN = length_B[:, None] + torch.arange(depth_BN.shape[1], device=row_B.device)
    slot_BN = page_BP.gather(1, index_BN // page_size) * page_size + index_BN % page_size
    return Places(page_BP, length_B, length_B[:, None] + depth_BN, slot_BN)
