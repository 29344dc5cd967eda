"""Who moves the weights, and how fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from jetspec.train.config import OptimizerConfig


def make_optimizers(head: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all trainable weights, or Muon for the matrices between hidden states and AdamW for the rest.

    The rows of an edge codebook belong to tokens, and most see no gradient in a step: nothing for Muon, which moves
    a matrix as a whole. Only matrices decay: norms and biases are few and have their own scale.
    """
    named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if is_hidden_matrix(name, p)] if config.kind == "muon" else []
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
        decay, scale = config.weight_decay, "match_rms_adamw"
        optimizers.append(torch.optim.Muon(hidden, lr=config.lr, weight_decay=decay, adjust_lr_fn=scale))
    return optimizers


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a weight maps states to states: all matrices but those of the edge term and of the output."""
    return parameter.dim() == 2 and not name.startswith(("edge.", "lm_head."))


def lr_frac(step: float, steps: int, config: OptimizerConfig) -> float:
    """Share of the full learning rate at a step: a linear rise, then a cosine. Time may count for parts of a step."""
    warmup = max(1, round(config.warmup_frac * steps))
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    done = (step - warmup) / max(1, steps - warmup)
    return config.final_lr_frac + (1 - config.final_lr_frac) * 0.5 * (1 + math.cos(math.pi * done))
