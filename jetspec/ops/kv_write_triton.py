"""Triton kernels of `kv_write`.

Layout: K and V pages are (pages, S, G, E); slot s starts at s * ROW, head g of it at g * HEAD. New K and V are rows of
G * E numbers. Source and target slots of a compaction are (B, NUM), contiguous. For `place`,
all int64: the page table is (R, P) and cached lengths (R,), both contiguous; rows (B,), depths (B, N) with unit stride
in N; outputs are page tables (B, P), lengths (B,), positions and slots (B, N), contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import Placement, SlotRows
from jetspec.ops.overlap_triton import launch
from jetspec.types import KVPages

COMPACT_BLOCK = 128
PLACE_BLOCK = 256
"""Pages, and nodes, per program."""


def check_slots(pages: KVPages) -> None:
    """Assert that K and V share one stride per slot and one per head."""
    k = pages.k
    assert k.stride() == pages.v.stride() and k.stride(3) == 1 and k.stride(0) == k.shape[1] * k.stride(1)


def store_kv_triton(pages: KVPages, k_TGE: Tensor, v_TGE: Tensor, slot_T: Tensor) -> None:
    check_slots(pages)
    k, v = k_TGE.flatten(1), v_TGE.flatten(1)  # views, also for slices of a wider row
    T, size = k.shape
    sizes = {"SIZE": size, "E": k_TGE.shape[2], "ROW": pages.k.stride(1), "HEAD": pages.k.stride(2)}
    sizes["BLOCK"] = triton.next_power_of_2(size)
    if T:
        tensors = k, v, pages.k, pages.v, slot_T.contiguous()
        launch(_store_kv_kernel, (T,), *tensors, k.stride(0), v.stride(0), **sizes)


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
    assert storage.is_contiguous()
    _, L, pages, S, G, E = storage.shape
    _compact(storage, 2 * L, G * E, pages * S, source_BD1, target_BD1)


def compact_rows_triton(layers: SlotRows, source_BD1: Tensor, target_BD1: Tensor) -> None:
    """Copy rows as 32-bit words, whatever their dtype."""
    first = layers.rows_L[0]
    words = first.shape[1] * first.element_size() // 4
    _compact(layers.address_L, len(layers.rows_L), words, None, source_BD1, target_BD1)


def _compact(
    storage: Tensor, planes: int, size: int, num_slots: int | None, source_BD1: Tensor, target_BD1: Tensor
) -> None:
    assert source_BD1.shape == target_BD1.shape
    B, num = source_BD1.shape
    sizes = {"NUM": num, "SLOTS": triton.next_power_of_2(num), "SIZE": size, "BLOCK": COMPACT_BLOCK}
    if B and num:
        grid = B, planes, triton.cdiv(size, COMPACT_BLOCK)
        launch(_compact_kernel, grid, storage, source_BD1.contiguous(), target_BD1.contiguous(), num_slots, **sizes)


@triton.jit
def _compact_kernel(
    storage_ptr,
    source_ptr,
    target_ptr,
    num_slots,
    NUM: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of elements of one layer's K or V in all slots of a row, through registers. SLOTS is NUM rounded up.
    Without `num_slots`, `storage_ptr` holds the addresses of the layers.

    Only this program touches these elements. Its threads may not write before all of them have read.
    """
    if num_slots is None:
        storage_ptr = tl.load(storage_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    else:
        storage_ptr += tl.program_id(1).to(tl.int64) * num_slots * SIZE
    row = tl.program_id(0)
    entry = tl.arange(0, SLOTS)
    source = tl.load(source_ptr + row * NUM + entry, mask=entry < NUM, other=0).to(tl.int64)
    target = tl.load(target_ptr + row * NUM + entry, mask=entry < NUM, other=0).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    copied = (source != target)[:, None] & (element < SIZE)[None]

    base = storage_ptr + element[None]
    x = tl.load(base + source[:, None] * SIZE, mask=copied)
    tl.debug_barrier()
    tl.store(base + target[:, None] * SIZE, x, mask=copied)


def place_triton(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Placement:
    """One launch instead of a dozen small ones."""
    (B, N), P = depth_BN.shape, page_RP.shape[1]
    assert page_RP.is_contiguous() and depth_BN.stride(1) == 1
    page_BP, position_BN, slot_BN = (torch.empty(B, n, dtype=torch.int64, device=row_B.device) for n in (P, N, N))
    placed = Placement(page_BP, torch.empty(B, dtype=torch.int64, device=row_B.device), position_BN, slot_BN)
    grid, sizes = (B, triton.cdiv(max(P, N), PLACE_BLOCK)), {"PAGE_SIZE": page_size, "BLOCK": PLACE_BLOCK}
    launch(_place_kernel, grid, page_RP, length_R, row_B, depth_BN, *placed, N, P, depth_BN.stride(0), **sizes)
    return placed


@triton.jit(do_not_specialize=["N", "P", "depth_stride_b"])
def _place_kernel(
    page_ptr,
    length_ptr,
    row_ptr,
    depth_ptr,
    page_out_ptr,
    length_out_ptr,
    position_ptr,
    slot_ptr,
    N,
    P,
    depth_stride_b,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of pages and one block of nodes of a request."""
    # copy the length
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + request)
    length = tl.load(length_ptr + row)
    tl.store(length_out_ptr + request, length)  # the same value from every block

    # copy the page table
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(page_ptr + row * P + lane, mask=lane < P)
    tl.store(page_out_ptr + request * P + lane, page, mask=lane < P)

    # positions and slots of nodes
    is_node = lane < N
    depth = tl.load(depth_ptr + request * depth_stride_b + lane, mask=is_node)
    tl.store(position_ptr + request * N + lane, length + depth, mask=is_node)
    index = length + lane
    page = tl.load(page_ptr + row * P + index // PAGE_SIZE, mask=is_node)
    tl.store(slot_ptr + request * N + lane, page * PAGE_SIZE + index % PAGE_SIZE, mask=is_node)
