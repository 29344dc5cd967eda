"""Triton kernel of `place`: one launch instead of a dozen small ones.

Layout, int64: the page table is (R, P) and cached lengths (R,), both contiguous; rows (B,), depths (B, N) with unit
stride in N; outputs are page tables (B, P), lengths (B,), positions and slots (B, N), contiguous.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import Placement

BLOCK = 256
"""Pages, and nodes, per program."""


def place_triton(page_RP: Tensor, length_R: Tensor, row_B: Tensor, depth_BN: Tensor, page_size: int) -> Placement:
    (B, N), P = depth_BN.shape, page_RP.shape[1]
    assert page_RP.is_contiguous() and depth_BN.stride(1) == 1
    page_BP, position_BN, slot_BN = (torch.empty(B, n, dtype=torch.int64, device=row_B.device) for n in (P, N, N))
    length_B = torch.empty(B, dtype=torch.int64, device=row_B.device)
    _place_kernel[(B, triton.cdiv(max(P, N), BLOCK))](
        page_RP,
        length_R,
        row_B,
        depth_BN,
        page_BP,
        length_B,
        position_BN,
        slot_BN,
        N,
        P,
        depth_BN.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return Placement(page_BP, length_B, position_BN, slot_BN)


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
