"""Models to profile: published shapes with random weights, or real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from jetspec.models.decoder import Decoder, DecoderConfig, MoEConfig, RopeConfig
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_format import load_head
from jetspec.models.hub import resolve
from jetspec.models.weights import load_target, open_model, random_weights
from jetspec.train.config import HeadShape
from jetspec.train.run import head_config

Weights = Literal["random", "real"]
GB = 1e9

QWEN3 = DecoderConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    inner_size=12_288,
    max_len=40_960,
    rope=RopeConfig(theta=1e6),
    qk_norm=True,
)
SMOLLM2 = DecoderConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    inner_size=1536,
    max_len=8192,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e5),
    tied_embedding=True,
)
SHAPES = {
    "qwen3-8b": QWEN3,
    "qwen3-30b-a3b": replace(
        QWEN3,
        family="qwen3_moe",
        hidden_size=2048,
        num_layers=48,
        num_kv_heads=4,
        inner_size=6144,
        moe=MoEConfig(num_experts=128, num_chosen=8, inner_size=768, normalize=True),
        moe_layers=tuple(range(48)),
    ),
    "qwen3-0.6b": replace(QWEN3, hidden_size=1024, num_layers=28, num_heads=16, inner_size=3072, tied_embedding=True),
    "smollm2-135m": SMOLLM2,
}


def shape_of(name: str) -> DecoderConfig:
    """Shape of a known name, or of a model's files."""
    if name in SHAPES:
        return SHAPES[name]
    try:
        path = resolve(name)
    except ValueError as error:
        raise ValueError(f"{error}, nor a shape ({', '.join(SHAPES)})") from None
    return open_model(path).config


def open_target(name: str, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Loads or creates a target."""
    if weights == "random":
        config = shape_of(name)
        check_room(name, config, dtype, device)
        return random_weights(Decoder, config, dtype, device)
    if name in SHAPES:
        raise ValueError(f"{name} is a shape without weights; name a model, folder or GGUF file, or use random weights")
    return load_target(name, dtype, device).decoder


def check_room(name: str, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses weights that do not fit into free memory, where its size is known."""
    with torch.device("meta"):
        needed = sum(parameter.numel() for parameter in Decoder(config).parameters()) * dtype.itemsize
    free = free_memory(device)
    if free is not None and needed > free:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} in {kind} takes {needed / GB:.1f} GB, and {device.type} has {free / GB:.1f} GB free; "
            f"choose a smaller shape{', or --dtype bfloat16' if dtype.itemsize > 2 else ''}"
        )


def free_memory(device: torch.device) -> int | None:
    """Free memory in bytes, where the system reports it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)


def open_head(target: Decoder, path: str | None, shape: HeadShape) -> DraftHead:
    """Loads the head at `path`, or creates one of a shape with random weights."""
    dtype, device = target.embedding.dtype, target.embedding.device
    if path is not None:
        return load_head(path, target.config, dtype, device)
    config = head_config(shape, target.config)
    if not all(0 <= layer < target.config.num_layers for layer in config.tap_layers):
        raise ValueError(
            f"a head of {shape.num_layers} layers does not fit a target of {target.config.num_layers}; give it fewer"
        )
    return random_weights(DraftHead, config, dtype, device)
