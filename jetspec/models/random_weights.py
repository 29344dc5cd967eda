"""Models with random weights, for measurements: they run at the speed of trained ones."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from jetspec.models.decoder import Decoder, DecoderConfig, DecoderStack
from jetspec.models.draft_head import DraftHead, HeadConfig

S = TypeVar("S", bound=DecoderStack)
STD = 0.02
ADDING = ("attention.out.weight", "mlp.down", "mlp.down.weight")
"""Weights whose products are added to the residual."""


def random_target(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        target = Decoder(config)
    _randomize(target, dtype, device)
    if config.tied_embedding:
        target.lm_head = target.embedding
    return target


def random_head(config: HeadConfig, dtype: torch.dtype, device: torch.device) -> DraftHead:
    with torch.device("meta"):
        head = DraftHead(config)
    return _randomize(head, dtype, device)


def _randomize(stack: S, dtype: torch.dtype, device: torch.device) -> S:
    """Fills a stack on the meta device, directly on its final device: copying large weights takes long."""
    generator = torch.Generator(device).manual_seed(0)

    def values(name: str, shape: torch.Size) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            return empty.normal_(0, _std(stack.config, name), generator=generator)
        return empty.fill_(0 if name.endswith("bias") else 1)

    state = {name: values(name, parameter.shape) for name, parameter in stack.named_parameters()}
    stack.load_state_dict(state, strict=False, assign=True)
    stack.inv_freq = stack.inv_freq.to(device)
    return stack.requires_grad_(False).eval()


def _std(config: DecoderConfig, name: str) -> float:
    """Standard deviation that keeps the states of different tokens different, so that they are routed to different
    experts: deeper models add less per layer, as in usual initialisations."""
    if name == "embedding":  # the scale of layer inputs; a tied one also computes logits
        return STD if config.tied_embedding else 1
    if name.endswith(ADDING):
        return STD / math.sqrt(2 * config.num_layers)
    return STD
