"""Lower bound on the time of a pass: its matrix products over the model's weights, by torch's library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.models.decoder import Decoder, DecoderStack, Linear, MoE
from jetspec.models.draft_head import DraftHead
from jetspec.profile.timing import as_graph, time_ms

READ_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Far more than fits into a cache."""


def read_gb_per_s(device: torch.device, calls: int) -> float:
    """Memory bandwidth, measured by one long sum."""
    memory = torch.zeros(READ_BYTES[device.type] // 4, device=device)
    return memory.nbytes / time_ms(as_graph(memory.sum, device), device, calls) / 1e6


@dataclass(frozen=True)
class Floor:
    """Matrix products, each a weight and its input, and weights that are only read."""

    products: list[tuple[Tensor, Tensor]]
    reads: list[Tensor]

    def run(self) -> None:
        for weight, x in self.products:
            F.linear(x, weight)
        for weight in self.reads:
            weight.view(torch.int64).sum()  # widest loads

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in (*(weight for weight, _ in self.products), *self.reads))


def plain_floor(target: Decoder, batch: int, experts: Sequence[int]) -> Floor:
    """Floor of a plain step. `experts` are the numbers of experts that a pass visits, per sparse layer."""
    return _floor(target, [(weight, batch) for weight in (*_weights(target), target.lm_head)], experts)


def round_floor(target: Decoder, head: DraftHead, batch: int, budget: int, experts: Sequence[int]) -> Floor:
    """Floor of a round: the head over its block, the target over every node, logits of both, and the head's context
    rows of a path of full depth."""
    config = head.head_config
    draft = [(weight, batch * config.block_size) for weight in _weights(head)]
    verify = [(weight, batch * budget) for weight in (*_weights(target), target.lm_head)]
    observe = [(weight, batch * (config.depth + 1)) for weight in _context_weights(head)]
    return _floor(target, [*draft, (target.lm_head, batch * config.depth), *verify, *observe], experts)


def count_experts(target: Decoder, run: Callable[[], object]) -> list[int]:
    """Counts the experts that a pass of the target visits, per sparse layer."""
    counts: list[int] = []

    def note(moe: nn.Module, inputs: Any) -> None:
        residual, norm, *_ = inputs
        counts.append(len(cast(MoE, moe).route(residual, norm).expert_TK.unique()))

    hooks = [moe.register_forward_pre_hook(note) for moe in _mixtures(target)]
    run()
    for hook in hooks:
        hook.remove()
    return counts


def _floor(target: Decoder, products: list[tuple[Tensor, int]], experts: Sequence[int]) -> Floor:
    """An expert has few rows, so its product takes as long as reading it. Any experts serve as those read."""
    inputs = {(rows, weight.shape[1]): weight.new_empty(rows, weight.shape[1]).normal_() for weight, rows in products}
    reads = []
    for moe, count in zip(_mixtures(target), experts, strict=True):
        reads += [moe.gate_up[:count], moe.down[:count]]
    return Floor([(weight, inputs[rows, weight.shape[1]]) for weight, rows in products], reads)


def _weights(stack: DecoderStack) -> list[Tensor]:
    """Weights of all products in the layers, without experts."""
    return [module.weight for module in stack.layers.modules() if isinstance(module, Linear)]


def _context_weights(head: DraftHead) -> list[Tensor]:
    """Weights of the products that turn tapped states into K and V."""
    adapter = [] if head.adapter is None else [head.adapter.weight] * len(head.head_config.tap_layers)
    return [*adapter, head.fc.weight, head.context_weights().weight]


def _mixtures(target: Decoder) -> list[MoE]:
    return [module for module in target.layers.modules() if isinstance(module, MoE)]
