"""Operations on rows between the products of a layer: RMS norm, rotary position embeddings (RoPE), SwiGLU.

The kernels compute in fp32 and take tensors of one dtype. Mixed dtypes, as under autocast, use the references.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops.kv_write import store_kv
from jetspec.ops.layouts import HeadNorm, RotaryTables, equal_distance
from jetspec.ops.select import operation, select
from jetspec.types import KVPages


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension. The statistics are in fp32 for every dtype."""
    return select("rms_norm", rms_norm_reference, x, weight)(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch. One row on a CPU, as in plain decoding, has a shortcut: half a dozen small operations would
    cost more than the arithmetic."""
    if x.device.type == "cpu" and x.numel() == x.shape[-1] and x.dtype == torch.float32 and not x.requires_grad:
        row = x.flatten()
        return (x * weight).mul_((float(row.dot(row)) / len(row) + eps) ** -0.5)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@operation(lambda position, *_: (position,))
def rope(position: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> RotaryTables:
    """Return the tables of `rotate` for integer positions (...)."""
    angle = position.to(torch.float32)[..., None, None] * inv_freq
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate each pair (i, i + E/2) of the last dimension by the angle of its position."""
    cos, signed_sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


@operation(lambda qkv, _, tables, norm: (qkv, *tables, *_weights(norm)))
def rotate_qkv(
    qkv: Tensor, num_kv_heads: int, tables: RotaryTables, norm: HeadNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split attention heads, (..., H + 2G, E), into q (..., H, E) and k, v (..., G, E), with q and k normalized, if a
    norm is given, and rotated. H may be 0."""
    G, H = num_kv_heads, qkv.shape[-2] - 2 * num_kv_heads
    qk, v = qkv.split((H + G, G), -2)
    if norm is None:
        q, k = rotate(qk, tables).split((H, G), -2)
        return q, k, v
    q, k = qk.split((H, G), -2)
    q, k = rms_norm_reference(q, norm.q, norm.eps), rms_norm_reference(k, norm.k, norm.eps)
    return rotate(q, tables), rotate(k, tables), v


@operation(lambda qkv, _, tables, norm, pages, slot: (qkv, pages.k, *tables, *_weights(norm)))
def rotate_store(
    qkv_TXE: Tensor, num_kv_heads: int, tables: RotaryTables, norm: HeadNorm | None, pages: KVPages, slot_T: Tensor
) -> Tensor:
    """Apply `rotate_qkv`, write K and V to their slots of the paged cache and return q_THE. X is H + 2G here."""
    q_THE, k_TGE, v_TGE = rotate_qkv(qkv_TXE, num_kv_heads, tables, norm)
    store_kv(pages, k_TGE, v_TGE, slot_T)
    return q_THE


@operation(
    lambda kv, tables, norm_L, pages_L, _: (kv, pages_L[0].k, *tables, *_weights(norm_L)),
    lambda kv, tables, norm_L, pages_L, _: {"equal_distance": equal_distance(pages_L) is not None},
)
def rotate_store_layers(
    kv_TLXE: Tensor, tables: RotaryTables, norm_L: HeadNorm | None, pages_L: Sequence[KVPages], slot_T: Tensor
) -> None:
    """`rotate_store` for keys and values of several layers. X is 2G here."""
    for i, (kv_TXE, pages) in enumerate(zip(kv_TLXE.unbind(1), pages_L, strict=True)):
        norm = None if norm_L is None else norm_L.layer(i)
        rotate_store(kv_TXE, kv_TXE.shape[1] // 2, tables, norm, pages, slot_T)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., I), for (..., 2I) with the gate first.

    The kernel rounds only the product, the reference also silu(gate): in bf16 they differ by one rounding.
    """
    return select("swiglu", swiglu_reference, gate_up)(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _weights(norm: HeadNorm | None) -> tuple[Tensor, ...]:
    return () if norm is None else (norm.q, norm.k)
