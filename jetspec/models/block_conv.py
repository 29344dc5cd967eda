"""Causal convolution over the slots of a block, around attention and MLP of each layer (DFlash2 heads)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec import ops
from jetspec.models.decoder import MLP, Attend, DecoderConfig, DecoderLayer, Linear, RMSNorm, Rope
from jetspec.ops import Residual


@dataclass(frozen=True)
class ConvConfig:
    """Shape of the convolutions of a layer."""

    taps: int = 2
    """Slots that each result reads: its own and those just before it."""
    group: int = 16
    """Channels that share the computed part of a kernel."""


class BlockConv(nn.Module):
    """Two convolutions, before and after a sublayer. Both kernels are computed from the sublayer's normed input.

    The kernel of a slot is a learned one of its own per channel plus a computed one per group of channels.
    """

    def __init__(self, config: ConvConfig, hidden_size: int, block_size: int) -> None:
        super().__init__()
        if hidden_size % config.group:
            raise ValueError(f"conv_group_size {config.group} does not divide the hidden size {hidden_size}")
        self.config, self.block_size = config, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.taps, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * config.taps * (hidden_size // config.group))

    def reset(self) -> None:
        """Sets both convolutions to the identity."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both kernels of rows (.., M), (.., taps, M) each."""
        computed = self.kernel_projection(x).unflatten(-1, (2, self.config.taps, -1))
        before, after = (self.base_kernel + computed.repeat_interleave(self.config.group, -1)).unbind(-3)
        return before, after

    def forward(self, kernel: Tensor, x: Tensor) -> Tensor:
        """Convolves rows (.., slots, M) of whole blocks. Slots before the first one of a block count as 0."""
        slots = x.unflatten(-2, (-1, self.block_size))
        kernels = kernel.unflatten(-3, (-1, self.block_size))
        out = kernels[..., 0, :] * slots
        for back in range(1, min(self.config.taps, self.block_size)):
            out = out + kernels[..., back, :] * F.pad(slots, (0, 0, back, 0))[..., : self.block_size, :]
        return out.flatten(-3, -2)


class ConvLayer(DecoderLayer):
    """A decoder layer whose attention and MLP each stand between two convolutions."""

    mlp: MLP

    def __init__(self, config: DecoderConfig, layer: int, conv: ConvConfig, block_size: int) -> None:
        super().__init__(config, layer)
        self.attention_conv = BlockConv(conv, config.hidden_size, block_size)
        self.mlp_conv = BlockConv(conv, config.hidden_size, block_size)

    def forward(
        self, residual: Residual, rope: Rope, attend: Attend, next_norm: RMSNorm, tap: Tensor | None = None
    ) -> Residual:
        x = self.input_norm(residual.x)
        before, after = self.attention_conv.kernels(x)
        qkv = self.attention.qkv(self.attention_conv(before, x))
        y = residual.x + self.attention_conv(after, self.attention.out(self.attention.attend(qkv, rope, attend)))
        x = self.post_norm(y)
        before, after = self.mlp_conv.kernels(x)
        inner = ops.swiglu(self.mlp.gate_up(self.mlp_conv(before, x)))
        return ops.copied(Residual(y + self.mlp_conv(after, self.mlp.down(inner))), tap)
