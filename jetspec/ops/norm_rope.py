"""RMS normalisation and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. The statistics are in fp32 whatever the dtype.

    A plain step on a CPU norms one row at a time, and there half a dozen small operations cost more than the
    arithmetic: a dot product and a number do.
    """
    if x.device.type == "cpu" and x.numel() == x.shape[-1] and x.dtype == torch.float32 and not x.requires_grad:
        row = x.flatten()
        return (x * weight).mul_((float(row.dot(row)) / len(row) + eps) ** -0.5)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope(position: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables for `rotate`: cos and signed sin, (..., 1, E), for integer positions (...)."""
    angle = position.to(torch.float32)[..., None, None] * inv_freq
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + E/2) of the last dimension by its position's angle."""
    cos, signed_sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)
