"""What drafting a token costs beside a verify pass: the coefficient c of the speedup formula, by context and depth.

    c = t_draft / (k * t_verify)

for a chain of k drafts from one pass of a head, which the target checks in one pass. Random weights take as long as
real ones, so a shape is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch

from jetspec.bench.profile import Decoding, StandingRound, Workload
from jetspec.bench.shapes import open_head, open_target
from jetspec.bench.spread import to_record
from jetspec.config import TreeConfig
from jetspec.engine.llm import choose_device, choose_dtype
from jetspec.models.decoder import Decoder
from jetspec.record import shown
from jetspec.train.config import HeadShape, at_least

TIMED = ("draft", "build", "verify")
"""Stages up to the last that counts; each works on what the one before it left."""


@dataclass(frozen=True)
class CostConfig:
    """A recipe with `measure: costs`."""

    shape: str = "smollm2-135m"
    """A shape that `jetspec profile` knows, or that of a model."""
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Drafts in one pass."""
    head_layers: int = 5
    rounds: int = 50
    """Calls that a time is taken from."""
    repeats: int = 3
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        for name in ("head_layers", "rounds", "repeats"):
            at_least(1, name, getattr(self, name))
        for name in ("contexts", "depths"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        for context in self.contexts:
            at_least(1, "a context", context)
        for depth in self.depths:
            TreeConfig(depth=depth)


def measure_costs(config: CostConfig) -> Iterator[dict[str, Any]]:
    """An entry per context and depth."""
    device = choose_device(config.device)
    target = open_target(config.shape, "random", choose_dtype(config.dtype, device), device)
    for depth, context in product(config.depths, config.contexts):
        yield measure_cost(target, config, context, depth)


@torch.inference_mode()
def measure_cost(target: Decoder, config: CostConfig, context: int, depth: int) -> dict[str, Any]:
    head = open_head(target, None, HeadShape(num_layers=config.head_layers, block_size=depth + 1))
    chain = TreeConfig(budget=depth + 1, width=1)
    still = StandingRound(Decoding(target, head, chain, Workload(context, rounds=1)).engine)
    times = [still.stages_ms(config.rounds, TIMED) for _ in range(config.repeats)]
    return {
        "context": context,
        "depth": depth,
        "draft_ms": to_record([time["draft"] for time in times]),
        "verify_ms": to_record([time["verify"] for time in times]),
        "c_percent": to_record([100 * time["draft"] / (depth * time["verify"]) for time in times]),
    }


def cost_results(config: CostConfig, costs: list[dict[str, Any]]) -> dict[str, Any]:
    device = choose_device(config.device)
    return {
        "model": shown(config.shape),
        "dtype": str(choose_dtype(config.dtype, device)).removeprefix("torch."),
        "device": device.type,
        "recipe": {**asdict(config), "shape": shown(config.shape)},
        "costs": costs,
    }
