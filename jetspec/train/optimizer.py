"""Who moves the weights, and how fast."""

from __future__ import annotations

import math

import torch
from torch import nn

from jetspec.train.config import OptimizerConfig


def make_optimizers(head: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all trainable weights, or Muon for the layers' matrices and AdamW for the rest.

    Only matrices decay: norms and biases are few and have their own scale.
    """
    named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.dim() == 2 and name.startswith("layers.")] if config.kind == "muon" else []
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas))
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay))
    return optimizers


def lr_frac(step: int, steps: int, config: OptimizerConfig) -> float:
    """Share of the full learning rate at a step: a linear rise, then a cosine."""
    warmup = max(1, round(config.warmup_frac * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.final_lr_frac + (1 - config.final_lr_frac) * 0.5 * (1 + math.cos(math.pi * done))
