"""Models of a shape without weights of their own: random ones cost what real ones cost."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from jetspec.models.decoder import Decoder, DecoderConfig, DecoderStack
from jetspec.models.draft_head import DraftHead, HeadConfig

S = TypeVar("S", bound=DecoderStack)
STD = 0.02


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
    """Give a stack on the meta device weights, made where they stay: large ones would take long to send there."""
    generator = torch.Generator(device).manual_seed(0)
    # Tokens as large as what layers add stay apart, and go to experts of their own. As logits they would be too large.
    apart = () if stack.config.tied_embedding else ("embedding",)

    def values(name: str, shape: torch.Size) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            return empty.normal_(0, 1 if name in apart else STD, generator=generator)
        return empty.fill_(0 if name.endswith("bias") else 1)

    state = {name: values(name, parameter.shape) for name, parameter in stack.named_parameters()}
    stack.load_state_dict(state, strict=False, assign=True)
    stack.inv_freq = stack.inv_freq.to(device)
    return stack.requires_grad_(False).eval()
