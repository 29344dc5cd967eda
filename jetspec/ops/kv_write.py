"""Writing the paged KV cache. A slot is page * page size + offset: the flat index of a position in storage."""

from __future__ import annotations

from torch import Tensor

from jetspec.dispatch import uses_kernel
from jetspec.types import KVPages


def store_kv(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    """Write K and V of T tokens to their slots."""
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
