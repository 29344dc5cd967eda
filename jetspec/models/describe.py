"""Describes a model or a head from its files, without loading the weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from jetspec.models.decoder import Decoder, on_meta
from jetspec.models.gguf import GGUFFile
from jetspec.models.head_folder import kind_of
from jetspec.models.heads import format_of
from jetspec.models.hub import resolve
from jetspec.models.weights import OpenModel, load_tokenizer, open_model


def describe(path_or_id: str | Path) -> dict[str, Any]:
    """Returns facts about a target or a head; fetches its files if needed.

    A head that is refused, for its kind or a key of its config, has only `head_kind` and `problem`.
    """
    path = resolve(path_or_id)
    if (kind := kind_of(path)) is None:
        return {"kind": "target", "path": str(path)} | _describe_target(open_model(path))
    try:
        facts = format_of(path).describe(path)
    except ValueError as error:
        facts = {"problem": str(error)}
    return {"kind": "head", "path": str(path), "head_kind": kind} | facts


def fits(model: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """Returns the reasons why a described target and head do not fit each other."""
    if (model["kind"], head["kind"]) != ("target", "head"):
        return [f"a target and a head are needed, not a {model['kind']} and a {head['kind']}"]
    if "problem" in head:
        return [head["problem"]]
    path, target = Path(head["path"]), open_model(Path(model["path"])).config
    format = format_of(path)
    return format.misfits(format.for_target(format.read_config(path), target), target)


def _describe_target(model: OpenModel) -> dict[str, Any]:
    (tokenizer, eos_tokens), config = load_tokenizer(model), model.config
    path, stored_as = model.tensors.path, str(model.dtype).removeprefix("torch.")
    types: Counter[str] = Counter()
    if is_gguf := isinstance(model.tensors, GGUFFile):
        types.update(info.type.name for info in model.tensors.tensors.values())
    decoder = on_meta(Decoder, config)
    return {
        "format": "GGUF" if is_gguf else "safetensors",
        "family": config.family,
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
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
        "window": sorted({window for window in config.windows if window is not None}) or None,
        "rope": f"{config.rope.kind}, base {config.rope.theta:g}",
        "tied_embedding": config.tied_embedding,
        "stored_as": dict(types.most_common()) if is_gguf else stored_as,
        "bytes": sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path])),
        "chat_template": tokenizer.chat_template is not None,
        "end_tokens": [tokenizer.token_text(token) for token in sorted(eos_tokens)],
    }
