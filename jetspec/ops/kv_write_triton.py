"""Triton kernels of `kv_write`.

Layout: K and V pages are (pages, S, G, E); slot s starts at s * ROW, head g of it at g * HEAD. New K and V are rows of
G * E numbers. Source and target slots of a compaction are (B, NUM), contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import SlotRows
from jetspec.types import KVPages

COMPACT_BLOCK = 128


def check_slots(pages: KVPages) -> None:
    """Assert that K and V share one stride per slot and one per head."""
    k = pages.k
    assert k.stride() == pages.v.stride() and k.stride(3) == 1 and k.stride(0) == k.shape[1] * k.stride(1)


def store_kv_triton(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    check_slots(pages)
    k, v = k_TGE.flatten(1), v_TGE.flatten(1)  # views, also for slices of a wider row
    T, size = k.shape
    if T:
        _store_kv_kernel[(T,)](
            k,
            v,
            pages.k,
            pages.v,
            slot_T.contiguous(),
            k.stride(0),
            v.stride(0),
            SIZE=size,
            E=k_TGE.shape[2],
            ROW=pages.k.stride(1),
            HEAD=pages.k.stride(2),
            BLOCK=triton.next_power_of_2(size),
        )


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slot_ptr,
    k_stride_token,
    v_stride_token,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: copy its SIZE = G * E numbers of K and of V, unless its slot is negative."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    inside = (lane < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_stride_token + lane, mask=inside)
    v = tl.load(v_ptr + token * v_stride_token + lane, mask=inside)
    place = lane if HEAD == E else lane // E * HEAD + lane % E
    target = slot * ROW + place
    tl.store(k_pages_ptr + target, k, mask=inside)
    tl.store(v_pages_ptr + target, v, mask=inside)


def compact_kv_triton(storage: Tensor, source_BD1: Tensor, target_BD1: Tensor) -> None:
    assert storage.is_contiguous() and source_BD1.shape == target_BD1.shape
    _, L, pages, S, G, E = storage.shape
    B, num = source_BD1.shape
    if B and num:
        _compact_kv_kernel[(B, 2 * L, triton.cdiv(G * E, COMPACT_BLOCK))](
            storage,
            source_BD1.contiguous(),
            target_BD1.contiguous(),
            pages * S,
            NUM=num,
            NUM_PADDED=triton.next_power_of_2(num),
            SIZE=G * E,
            BLOCK=COMPACT_BLOCK,
        )


def compact_rows_triton(layers: SlotRows, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """Copy rows as 32-bit words, whatever their dtype."""
    assert source_BD1.shape == target_BD1.shape
    B, num = source_BD1.shape
    first = layers.rows_L[0]
    words = first.shape[1] * first.element_size() // 4
    if B and num:
        _compact_rows_kernel[(B, len(layers.rows_L), triton.cdiv(words, COMPACT_BLOCK))](
            layers.address_L,
            source_BD1.contiguous(),
            target_BD1.contiguous(),
            NUM=num,
            NUM_PADDED=triton.next_power_of_2(num),
            SIZE=words,
            BLOCK=COMPACT_BLOCK,
        )


@triton.jit
def _compact_rows_kernel(
    address_ptr,
    source_ptr,
    target_ptr,
    NUM: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_compact_kv_kernel` for layers at separate addresses."""
    storage_ptr = tl.load(address_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    _copy_rows(storage_ptr, source_ptr, target_ptr, NUM, NUM_PADDED, SIZE, BLOCK)


@triton.jit
def _compact_kv_kernel(
    storage_ptr,
    source_ptr,
    target_ptr,
    num_slots,
    NUM: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of elements, in all slots of a row, of one layer's K or V."""
    plane = tl.program_id(1).to(tl.int64)
    _copy_rows(storage_ptr + plane * num_slots * SIZE, source_ptr, target_ptr, NUM, NUM_PADDED, SIZE, BLOCK)


@triton.jit
def _copy_rows(
    storage_ptr,
    source_ptr,
    target_ptr,
    NUM: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of elements from source to target slots, through registers.

    Only this program touches these elements. Its threads may not write before all of them have read.
    """
    row = tl.program_id(0)
    entry = tl.arange(0, NUM_PADDED)
    source = tl.load(source_ptr + row * NUM + entry, mask=entry < NUM, other=0).to(tl.int64)
    target = tl.load(target_ptr + row * NUM + entry, mask=entry < NUM, other=0).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    copied = (source != target)[:, None] & (element < SIZE)[None]

    base = storage_ptr + element[None]
    x = tl.load(base + source[:, None] * SIZE, mask=copied)
    tl.debug_barrier()
    tl.store(base + target[:, None] * SIZE, x, mask=copied)
