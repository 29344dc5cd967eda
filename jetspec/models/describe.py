"""Describes a model or a head from its files, without loading the weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.gguf import GGUFFile
from jetspec.models.heads import describe_any_head, why_not
from jetspec.models.hub import resolve
from jetspec.models.weights import OpenModel, load_tokenizer, open_model


def describe(path_or_id: str | Path) -> dict[str, Any]:
    """Returns facts about a target or a head; fetches its files if needed."""
    path = resolve(path_or_id)
    head = describe_any_head(path)
    if head is not None:
        return {"kind": "head", "path": str(path)} | head
    return {"kind": "target", "path": str(path)} | _describe_target(open_model(path))


def fits(model: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """Returns the reasons why a described target and head do not fit each other."""
    if (model["kind"], head["kind"]) != ("target", "head"):
        return [f"a target and a head are needed, not a {model['kind']} and a {head['kind']}"]
    if "problem" in head:
        return [head["problem"]]
    return why_not(Path(head["path"]), open_model(Path(model["path"])).config)


def _describe_target(model: OpenModel) -> dict[str, Any]:
    tokenizer, eos_tokens = load_tokenizer(model)
    return (
        {"format": "GGUF" if isinstance(model.tensors, GGUFFile) else "safetensors", "family": model.config.family}
        | _shape(model.config)
        | {
            "stored_as": _stored_as(model),
            "bytes": _num_bytes(model.tensors.path),
            "chat_template": tokenizer.chat_template is not None,
            "end_tokens": [tokenizer.token_text(token) for token in sorted(eos_tokens)],
        }
    )


def _shape(config: DecoderConfig) -> dict[str, Any]:
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in Decoder(config).parameters())
    windows = sorted({window for window in config.windows if window is not None})
    return {
        "parameters": num_parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "inner_size": config.inner_size,
        "experts": config.moe.num_experts if config.moe else None,
        "experts_per_token": config.moe.num_chosen if config.moe else None,
        "vocab_size": config.vocab_size,
        "context": config.max_len,
        "window": windows or None,
        "rope": f"{config.rope.kind}, base {config.rope.theta:g}",
        "tied_embedding": config.tied_embedding,
    }


def _stored_as(model: OpenModel) -> dict[str, int] | str:
    """Returns the number of tensors per storage type of a GGUF file, or the dtype of a folder."""
    if isinstance(model.tensors, GGUFFile):
        return dict(Counter(info.type.name for info in model.tensors.tensors.values()).most_common())
    return str(model.dtype).removeprefix("torch.")


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))
