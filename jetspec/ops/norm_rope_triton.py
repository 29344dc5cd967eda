"""Triton kernels of `norm_rope`.

They run dozens of times per forward, on as little as one row, so launches must be cheap: only outputs are allocated,
and strides follow from constants.

Layout, contiguous: heads are (T, L, H + 2G, E) with L = 1 but for `rotate_store_layers`, tables (T, E), norm weights
(L, E); pages as in `kv_write_triton`; gate and up (T, 2I), with the gate first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.kv_write_triton import check_slots
from jetspec.ops.layouts import HeadNorm, RotaryTables, equal_distance, new_rows
from jetspec.ops.overlap_triton import launch, wait
from jetspec.types import KVPages

ROPE_ROWS = 4
HEADS = 8
"""Heads per program: few, so that even a single token is spread over several multiprocessors."""
MANY_TOKENS, MANY_HEADS, NORM_ROWS = 4096, 16, 4
"""From this many tokens on, heads per program of a rotation, and rows per program of a norm."""
MANY_COLUMNS = 4096
"""Longest row of the norm with several rows per program."""
SWIGLU_BLOCK = 1024


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, M = x.contiguous(), x.shape[-1]
    out = new_rows(len(x), M, like=x) if x.dim() == 2 else torch.empty_like(x)
    if rows := x.numel() // M:
        block = triton.next_power_of_2(M)
        num_warps = min(max(block // 512, 1), 16)
        if rows < MANY_TOKENS or block > MANY_COLUMNS:
            launch(_rms_norm_kernel, (rows,), x, weight, out, eps, M=M, BLOCK=block, num_warps=num_warps)
        else:
            sizes = {"M": M, "BLOCK": block, "ROWS": NORM_ROWS, "num_warps": min(2 * num_warps, 16)}
            launch(_rms_norm_rows_kernel, (triton.cdiv(rows, NORM_ROWS),), x, weight, out, eps, rows, **sizes)
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, M: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):
    """One row."""
    # load weights, which no preceding kernel writes
    start = tl.program_id(0).to(tl.int64) * M
    lane = tl.arange(0, BLOCK)
    inside = lane < M
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    wait(OVERLAP)
    # load, normalize and store the row
    x = tl.load(x_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / M + eps)
    tl.store(out_ptr + start + lane, x * scale * weight, mask=inside)


@triton.jit
def _rms_norm_rows_kernel(
    x_ptr, weight_ptr, out_ptr, eps, num_rows, M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """A few rows at once: more loads in flight when there are many rows."""
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + lane, mask=lane < M, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * M + lane[None]
    inside = (row < num_rows)[:, None] & (lane < M)[None]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / M + eps)
    tl.store(out_ptr + place, x * scale[:, None] * weight[None], mask=inside)


def rope_triton(position: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> RotaryTables:
    half, position = len(inv_freq), position.contiguous()
    cos = torch.empty((*position.shape, 1, 2 * half), dtype=dtype, device=position.device)
    signed_sin = torch.empty_like(cos)
    if rows := position.numel():
        sizes = {"HALF": half, "PAIRS": triton.next_power_of_2(half), "ROWS": ROPE_ROWS}
        grid = (triton.cdiv(rows, ROPE_ROWS),)
        launch(_rope_kernel, grid, position, inv_freq, cos, signed_sin, rows, scale, **sizes)
    return cos, signed_sin


@triton.jit(do_not_specialize=["num_rows"])
def _rope_kernel(
    position_ptr,
    inv_freq_ptr,
    cos_ptr,
    signed_sin_ptr,
    num_rows,
    scale,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Tables of a few positions. PAIRS is HALF rounded up to a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    inside = (row < num_rows)[:, None] & (pair < HALF)[None]
    position = tl.load(position_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq_ptr + pair, mask=pair < HALF, other=0.0)[None]
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    first = row[:, None] * (2 * HALF) + pair[None]
    tl.store(cos_ptr + first, cos, mask=inside)
    tl.store(cos_ptr + first + HALF, cos, mask=inside)
    tl.store(signed_sin_ptr + first, -sin, mask=inside)
    tl.store(signed_sin_ptr + first + HALF, sin, mask=inside)


def rotate_qkv_triton(
    qkv: Tensor, num_kv_heads: int, tables: RotaryTables, norm: HeadNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate_qkv`: q and k are new tensors, v is a view of the input."""
    qkv = qkv.contiguous()
    *lead, X, E = qkv.shape
    q = torch.empty((*lead, X - 2 * num_kv_heads, E), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((*lead, num_kv_heads, E), dtype=qkv.dtype, device=qkv.device)
    _launch_rotate(qkv, num_kv_heads, tables, norm, q, k, None, None)
    return q, k, qkv[..., X - num_kv_heads :, :]


def rotate_store_triton(
    qkv_TXE: Tensor, num_kv_heads: int, tables: RotaryTables, norm: HeadNorm | None, pages: KVPages, slot_T: Tensor
) -> Tensor:
    check_slots(pages)
    assert pages.k.shape[2] == num_kv_heads
    qkv_TXE = qkv_TXE.contiguous()
    T, X, E = qkv_TXE.shape
    q_THE = torch.empty((T, X - 2 * num_kv_heads, E), dtype=qkv_TXE.dtype, device=qkv_TXE.device)
    _launch_rotate(qkv_TXE, num_kv_heads, tables, norm, q_THE, pages.k, pages.v, slot_T.contiguous())
    return q_THE


def rotate_store_layers_triton(
    kv_TLXE: Tensor, tables: RotaryTables, norm: HeadNorm | None, pages_L: Sequence[KVPages], slot_T: Tensor
) -> None:
    """`rotate_store_layers`. It does not start early: the preceding kernel may be the one that writes the tables."""
    pages, distance = pages_L[0], equal_distance(pages_L)
    assert distance is not None
    check_slots(pages)
    _, L, X, E = kv_TLXE.shape
    assert pages.k.shape[2] == X // 2 and (norm is None or norm.k.shape == (L, E))
    kv, none = kv_TLXE.contiguous(), kv_TLXE.new_empty(0)
    _launch_rotate(kv, X // 2, tables, norm, none, pages.k, pages.v, slot_T.contiguous(), L, distance, early=False)


def _launch_rotate(
    qkv: Tensor,
    num_kv_heads: int,
    tables: RotaryTables,
    norm: HeadNorm | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    slot: Tensor | None,
    layers: int = 1,
    distance: int = 0,
    early: bool = True,
) -> None:
    X, E = qkv.shape[-2:]
    cos, signed_sin = tables
    tokens = cos.numel() // E
    assert cos.is_contiguous() and signed_sin.is_contiguous() and qkv.numel() == tokens * layers * X * E
    heads = X if v is not None else X - num_kv_heads
    at_once = HEADS if tokens < MANY_TOKENS else MANY_HEADS
    *weights, eps = (None, None, 0.0) if norm is None else (norm.q, norm.k, norm.eps)
    sizes = {"H": X - 2 * num_kv_heads, "G": num_kv_heads, "HALF": E // 2, "HEADS": at_once}
    sizes["PAIRS"] = triton.next_power_of_2(E // 2)
    sizes["ROW"], sizes["HEAD"] = (num_kv_heads * E, E) if slot is None else (k.stride(1), k.stride(2))
    if tokens:
        args = qkv, cos, signed_sin, *weights, q, k, v, slot, eps, distance
        grid = tokens, triton.cdiv(heads, at_once), layers
        launch(_rotate_qkv_kernel, grid, *args, **sizes, **({} if early else {"OVERLAP": False}))


@triton.jit
def _rotate_qkv_kernel(
    qkv_ptr,
    cos_ptr,
    signed_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    eps,
    distance,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """A few heads of one token in one layer, as two halves: element i of one is rotated with element i of the other.

    PAIRS is HALF rounded up to a power of two. Pages of consecutive layers are `distance` elements apart. Keys and
    values are stored in row `slot`, without slots in row `token`, with strides ROW and HEAD. Values are only copied, or
    skipped without a `v_ptr`. Like the reference, this rounds after the norm and after the rotation.
    """
    # load slot, tables and norm weights: the preceding kernel, which writes the heads, does not write these
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    layer = tl.program_id(2).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + G), (head >= H + G) & (head < H + 2 * G)
    row = token
    if slot_ptr is not None:
        row = tl.load(slot_ptr + token).to(tl.int64)
    table = token * (2 * HALF) + pair
    low_cos, high_cos = _row(cos_ptr + table, is_pair), _row(cos_ptr + table + HALF, is_pair)
    low_sin, high_sin = _row(signed_sin_ptr + table, is_pair), _row(signed_sin_ptr + table + HALF, is_pair)
    low_weight, high_weight = low_cos, high_cos
    if q_norm_ptr is not None:
        first = layer * (2 * HALF) + pair
        low_weight = _head_weight(q_norm_ptr, k_norm_ptr, first, is_pair, is_q)
        high_weight = _head_weight(q_norm_ptr, k_norm_ptr, first + HALF, is_pair, is_q)

    # load heads
    wait(OVERLAP)
    row_of_heads = token * tl.num_programs(2) + layer
    source = qkv_ptr + row_of_heads * ((H + 2 * G) * 2 * HALF) + head[:, None] * (2 * HALF) + pair[None]
    inside = (head < H + 2 * G)[:, None] & is_pair[None]
    low_in, high_in = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    # RMS norm
    low, high = low_in.to(tl.float32), high_in.to(tl.float32)
    if q_norm_ptr is not None:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        low, high = _round(low * scale * low_weight, low_in.dtype), _round(high * scale * high_weight, low_in.dtype)

    # rotate
    rotated_low = low * low_cos + high * low_sin
    rotated_high = high * high_cos + low * high_sin

    # store q, k, v
    q_out = q_ptr + token * (H * 2 * HALF) + head[:, None] * (2 * HALF) + pair[None]
    tl.store(q_out, rotated_low, mask=is_q[:, None] & is_pair[None])
    tl.store(q_out + HALF, rotated_high, mask=is_q[:, None] & is_pair[None])
    k_out = k_ptr + layer * distance + row * ROW + (head - H)[:, None] * HEAD + pair[None]
    tl.store(k_out, rotated_low, mask=is_k[:, None] & is_pair[None])
    tl.store(k_out + HALF, rotated_high, mask=is_k[:, None] & is_pair[None])
    if v_ptr is not None:
        v_out = v_ptr + layer * distance + row * ROW + (head - H - G)[:, None] * HEAD + pair[None]
        tl.store(v_out, low_in, mask=is_v[:, None] & is_pair[None])
        tl.store(v_out + HALF, high_in, mask=is_v[:, None] & is_pair[None])


@triton.jit
def _row(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)[None]


@triton.jit
def _head_weight(q_norm_ptr, k_norm_ptr, element, mask, is_q):
    return tl.where(is_q[:, None], _row(q_norm_ptr + element, mask), _row(k_norm_ptr + element, mask))


@triton.jit
def _round(x, dtype):
    return x.to(dtype).to(tl.float32)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    *lead, double = gate_up.shape
    out = new_rows(gate_up.numel() // double, double // 2, like=gate_up).view(*lead, double // 2)
    if rows := gate_up.numel() // double:
        grid = rows, triton.cdiv(double // 2, SWIGLU_BLOCK)
        launch(_swiglu_kernel, grid, gate_up, out, INNER=double // 2, BLOCK=SWIGLU_BLOCK)
    return out


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False):
    """One block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    wait(OVERLAP)
    gate = tl.load(gate_up_ptr + row * 2 * INNER + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * INNER + column, gate * tl.sigmoid(gate) * up, mask=inside)
