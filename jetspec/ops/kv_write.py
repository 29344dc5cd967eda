"""Writing the paged KV cache. A slot is page * page size + offset: the flat index of a position in storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.ops.select import uses_kernel
from jetspec.types import KVPages


def store_kv(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    """Write K and V of T tokens to their slots. On a GPU a token whose slot is negative is not written."""
    if uses_kernel(pages.k):
        from jetspec.ops.kv_write_triton import store_kv_triton

        store_kv_triton(pages, k_TGE, v_TGE, slot_T)
    else:
        pages.k.flatten(0, 1).index_copy_(0, slot_T, k_TGE)
        pages.v.flatten(0, 1).index_copy_(0, slot_T, v_TGE)


def compact_kv(storage: Tensor, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """Copy slots in every layer at once, as if all of a row were read before any of it is written.

    `storage` is a whole pool, (2, L, pages, S, G, E). Rows are independent: no row's source is another's target.
    Targets that repeat within a row must come from equal sources.
    """
    if uses_kernel(storage):
        from jetspec.ops.kv_write_triton import compact_kv_triton

        compact_kv_triton(storage, source_BD1, target_BD1)
    else:
        flat = storage.flatten(2, 3)
        flat.index_copy_(2, target_BD1.flatten(), flat.index_select(2, source_BD1.flatten()))


@dataclass(frozen=True)
class SlotRows:
    """Layers that are stored apart, each with a row per slot: (slots, size). K and V of a slot may share its row."""

    rows_L: tuple[Tensor, ...]
    address_L: Tensor
    """Where the layers begin, for a kernel that serves all of them."""

    @classmethod
    def of(cls, layers: Iterable[Tensor]) -> SlotRows:
        rows_L = tuple(layers)
        assert all(rows.is_contiguous() and rows.shape[1] == rows_L[0].shape[1] for rows in rows_L)
        address_L = torch.tensor([rows.data_ptr() for rows in rows_L], dtype=torch.int64, device=rows_L[0].device)
        return cls(rows_L, address_L)


def compact_rows(layers: SlotRows, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """`compact_kv` for layers that are stored apart."""
    if uses_kernel(layers.rows_L[0]):
        from jetspec.ops.kv_write_triton import compact_rows_triton

        compact_rows_triton(layers, source_BD1, target_BD1)
    else:
        for rows in layers.rows_L:
            rows.index_copy_(0, target_BD1.flatten(), rows.index_select(0, source_BD1.flatten()))
