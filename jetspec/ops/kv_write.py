"""Slots of the paged KV cache: those of new tokens, and writes to them. A slot is page * page_size + offset: the flat
index of a token in storage."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.ops.layouts import Placement, SlotRows
from jetspec.ops.select import operation
from jetspec.types import KVPages


@operation(lambda page_RP, *_: (page_RP,))
def place(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Placement:
    """Place nodes after the cached tokens of their requests, `row_B` of the page table. All int64."""
    page_BP, length_B = page_RP[row_B], length_R[row_B]
    index_BN = length_B[:, None] + torch.arange(depth_BN.shape[1], device=row_B.device)
    slot_BN = page_BP.gather(1, index_BN // page_size) * page_size + index_BN % page_size
    return Placement(page_BP, length_B, length_B[:, None] + depth_BN, slot_BN)


@operation(lambda pages, *_: (pages.k,))
def store_kv(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    """Write K and V of T tokens to their slots. The kernel skips tokens with a negative slot."""
    pages.k.flatten(0, 1).index_copy_(0, slot_T, k_TGE)
    pages.v.flatten(0, 1).index_copy_(0, slot_T, v_TGE)


@operation(lambda storage, *_: (storage,))
def compact_kv(storage: Tensor, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """Copy slots in every layer at once, as if all sources of a row were read before any target is written.

    `storage` is a whole pool, (2, L, pages, S, G, E). Rows are independent: the source of a row is never the target of
    another. Repeated targets within a row must have equal sources.
    """
    flat = storage.flatten(2, 3)
    flat.index_copy_(2, target_BD1.flatten(), flat.index_select(2, source_BD1.flatten()))


@operation(lambda layers, *_: (layers.rows_L[0],))
def compact_rows(layers: SlotRows, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """`compact_kv` for layers in separate allocations."""
    for rows in layers.rows_L:
        rows.index_copy_(0, target_BD1.flatten(), rows.index_select(0, source_BD1.flatten()))
