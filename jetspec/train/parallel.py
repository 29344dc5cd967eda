"""Training with several processes: each holds the whole head (ddp), or a shard of every weight (fsdp)."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from jetspec.models.decoder import filled, on_meta
from jetspec.models.heads import Head


def shard(module: nn.Module, device: torch.device) -> None:
    """Shards every weight over all processes. Whole weights exist from a module's forward to the end of its backward.

    Gradients are summed, not averaged: the trainer divides by the weights of the positions.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = fully_shard(module, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # the only reduction of Gloo


def whole(x: Tensor) -> Tensor:
    """The full tensor of a sharded one. A collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def split_like(x: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded like another one."""
    x = x.to(other.device)
    return distribute_tensor(x, other.device_mesh, other.placements) if isinstance(other, DTensor) else x


H = TypeVar("H", bound=Head)


def frozen_copy(head: H, dtype: torch.dtype) -> H:
    """A copy of the head for decoding. A collective."""

    def copied(x: Tensor) -> Tensor:
        return whole(x.detach()).to(dtype if x.is_floating_point() else x.dtype, copy=True)

    state = {name: copied(x) for name, x in head.state_dict().items()}
    return filled(on_meta(type(head), head.head_config), state, head.inv_freq.device)
