"""Models with random weights, for measurements: they run at the speed of trained ones."""

from __future__ import annotations

import math

import torch

from jetspec.models.decoder import Decoder, DecoderConfig, S, filled, on_meta
from jetspec.models.draft_head import DraftHead, HeadConfig

STD = 0.02
ADDING = ("attention.out.weight", "mlp.down", "mlp.down.weight")
"""Weights whose products are added to the residual."""


def random_target(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    return _random(on_meta(Decoder, config), dtype, device)


def random_head(config: HeadConfig, dtype: torch.dtype, device: torch.device) -> DraftHead:
    return _random(on_meta(DraftHead, config), dtype, device)


def _random(stack: S, dtype: torch.dtype, device: torch.device) -> S:
    """Makes the weights directly on their device: copying large ones takes long."""
    generator, state = torch.Generator(device).manual_seed(0), {}
    for name, parameter in stack.named_parameters():
        state[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() > 1:
            state[name].normal_(0, _std(stack.config, name), generator=generator)
        else:
            state[name].fill_(0 if name.endswith("bias") else 1)
    return filled(stack, state, device)


def _std(config: DecoderConfig, name: str) -> float:
    """Standard deviation that keeps the states of different tokens different, so that they are routed to different
    experts: deeper models add less per layer, as in usual initialisations."""
    if name == "embedding":  # the scale of layer inputs; a tied one also computes logits
        return STD if config.tied_embedding else 1
    if name.endswith(ADDING):
        return STD / math.sqrt(2 * config.num_layers)
    return STD
