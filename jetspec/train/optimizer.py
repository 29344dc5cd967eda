"""Optimizers and the learning rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jetspec.train.config import OptimizerConfig


class BatchedMuon(torch.optim.Muon):
    """Muon on all matrices of one shape at once: one by one, they are too small for a GPU.

    Sharded matrices are updated one by one.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:  # type: ignore[override]
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for params in alike.values():
                self._update(params, group)
        return None

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Updates of the size of AdamW's, to matrices of one shape."""
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))
        updates = orthogonal(updates, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(updates.dtype)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates.unbind(), alpha=-0.2 * math.sqrt(max(params[0].shape)) * group["lr"])


def orthogonal(x_NIJ: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices with singular values near 1, by a few iterations of Newton-Schulz in bfloat16."""
    a, b, c = coefficients
    is_tall = x_NIJ.shape[1] > x_NIJ.shape[2]
    x = (x_NIJ.mT if is_tall else x_NIJ).bfloat16().contiguous()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def make_optimizers(head: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all trainable weights, or Muon for the matrices between hidden states and AdamW for the rest.

    Muon updates a matrix as a whole, which does not suit the codebooks of the edge term and the output matrix: their
    rows belong to tokens, and most have no gradient in a step. Weight decay applies to matrices only: norms and biases
    have their own scale.
    """
    hidden, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, p in head.named_parameters():
        if p.requires_grad:
            is_hidden = p.dim() == 2 and not name.startswith(("edge.", "lm_head."))
            (hidden if is_hidden and config.kind == "muon" else rest).append(p)
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        fused = all(p.is_cuda for p in rest)
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused))
    if hidden:
        more: Any = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(BatchedMuon(hidden, lr=config.lr, **more))
    return optimizers


def lr_frac(step: float, steps: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate at a step, which may be fractional: a linear rise, then a cosine."""
    warmup = max(1, round(config.warmup_frac * steps))
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    done = (step - warmup) / max(1, steps - warmup)
    return config.final_lr_frac + (1 - config.final_lr_frac) * 0.5 * (1 + math.cos(math.pi * done))
