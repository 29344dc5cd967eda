"""Writing the paged KV cache. A slot is page * page size + offset: the flat index of a position in storage."""

from __future__ import annotations

from torch import Tensor

from jetspec.types import KVPages


def store_kv(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    """Write K and V of T tokens to their slots."""
    pages.k.flatten(0, 1).index_copy_(0, slot_T, k_TGE)
    pages.v.flatten(0, 1).index_copy_(0, slot_T, v_TGE)


def compact_kv(storage: Tensor, source_T: Tensor, target_T: Tensor) -> None:
    """Copy slots in every layer at once, as if all were read before any is written.

    `storage` is a whole pool, (2, L, pages, S, G, E). Targets that repeat must come from equal sources.
    """
    flat = storage.flatten(2, 3)
    flat.index_copy_(2, target_T, flat.index_select(2, source_T))
