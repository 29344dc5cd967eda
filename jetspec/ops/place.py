"""Positions and KV cache slots for the nodes of a batch of trees, after the cached tokens of each request."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.layouts import Placement
from jetspec.ops.select import select


def place(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Placement:
    """Place nodes after the cached tokens of their requests, `row_B` of the page table. All int64."""
    return select("place", place_reference, page_RP)(page_RP, length_R, row_B, depth_BN, page_size)


def place_reference(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Placement:
    page_BP, length_B = page_RP[row_B], length_R[row_B]
    index_BN = length_B[:, None] + torch.arange(depth_BN.shape[1], device=row_B.device)
    slot_BN = page_BP.gather(1, index_BN // page_size) * page_size + index_BN % page_size
    return Placement(page_BP, length_B, length_B[:, None] + depth_BN, slot_BN)
