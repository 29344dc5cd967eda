"""Reads and writes EAGLE-3 heads in the published layout; reads that of the speculators library.

Layer numbers: `eagle_config.eagle_aux_hidden_state_layer_ids` counts layers by their outputs, as we do. The top-level
key of that name, and speculators, count the embedding as 0, so every number is one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.config import EAGLE3_DEPTH, EAGLE3_TAPS, MAX_DEPTH
from jetspec.models.decoder import DecoderConfig
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head, eagle3_tap_layers
from jetspec.models.families import MAX_LAYERS, Fields, config_from_hf
from jetspec.models.head_folder import HeadFormat, HeadTensors, Names, TargetShape, agreed, layer_fields, table
from jetspec.models.tensor_files import errors_name

ARCHITECTURE = "LlamaForCausalLMEagle3"
EMBEDDING = "embed_tokens.weight"
TAPS = "eagle_aux_hidden_state_layer_ids"
UNSUPPORTED = ("norm_before_fc", "norm_output", "parallel_drafting")
"""Switches of other writers that change the computation."""
NAMES = Names(
    own={
        "fc.weight": "fc.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.0.hidden_norm.weight": "midlayer.hidden_norm.weight",
    },
    # The last two are copies of the target's, which speculators keeps for training.
    ignored=frozenset({"d2t", "t2d", EMBEDDING, "verifier_norm.weight", "verifier_lm_head.weight"}),
    layer="midlayer.",
)


class Eagle3Format(HeadFormat[Eagle3Config, Eagle3Head]):
    """The published EAGLE-3 layout; reads that of the speculators library too."""

    kinds = ("EAGLE-3", "speculators (eagle3)")
    make = Eagle3Head
    names = NAMES

    def read_config(self, folder: Path) -> Eagle3Config:
        """Reads the config of a head's folder and checks every value.

        `tap_layers` is empty if the files name neither them nor the number of target layers; see `for_target`.
        """
        config = super().read_config(folder)
        with errors_name(folder):
            return replace(config, own_embedding=EMBEDDING in HeadTensors(folder, NAMES))

    def parse(self, raw: Mapping[str, Any]) -> Eagle3Config:
        if found := [key for key in UNSUPPORTED if raw.get(key)]:
            raise ValueError(f"{found[0]} is not supported")
        is_speculators = "speculators_model_type" in raw
        layers = _layer_config(table(raw, "transformer_layer_config") if is_speculators else raw)
        outer, own = Fields(raw), table(raw, "eagle_config")
        target_hidden_size = outer.size("target_hidden_size", layers.hidden_size)
        num_target_layers = outer.integer("num_target_layers", 0, MAX_LAYERS, 0) or None
        return Eagle3Config(
            layers=layers,
            tap_layers=_tap_layers(raw, own) or (eagle3_tap_layers(num_target_layers) if num_target_layers else ()),
            draft_vocab_size=outer.integer("draft_vocab_size", 1, layers.vocab_size, layers.vocab_size),
            depth=Fields(own).integer("ttt_length", 1, MAX_DEPTH, EAGLE3_DEPTH),
            target_hidden_size=None if target_hidden_size == layers.hidden_size else target_hidden_size,
            num_target_layers=num_target_layers,
            norm_before_residual=outer.flag("norm_before_residual"),
        )

    def write_config(self, config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the contents of config.json, with the tapped layers under both keys that other readers know."""
        c = config.layers
        assert c.qkv_bias == c.out_bias and c.moe is None and not any(c.windows)
        own = {TAPS: list(config.tap_layers), "use_aux_hidden_state": True, "ttt_length": config.depth}
        out: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": c.family,
            **layer_fields(c, dtype),
            "mlp_bias": c.mlp_bias,
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "num_target_layers": config.num_target_layers,
            "eagle_config": own,
            TAPS: [layer + 1 for layer in config.tap_layers],
        }
        if config.target_hidden_size is not None:
            out["target_hidden_size"] = config.target_hidden_size
        return out

    def facts(self, config: Eagle3Config, kind: str) -> dict[str, Any]:
        return {
            "format": "EAGLE-3" + (" (speculators)" if "speculators" in kind else ""),
            "tap_layers": list(config.tap_layers) or "as the target decides",
            "draft_vocab_size": config.draft_vocab_size,
            "own_embedding": config.own_embedding,
        }

    def for_target(self, config: Eagle3Config, target: DecoderConfig) -> Eagle3Config:
        """Adds the default tap layers, if the head's files name none."""
        return config if config.tap_layers else replace(config, tap_layers=eagle3_tap_layers(target.num_layers))

    def misfits(self, head: Eagle3Config, target: TargetShape) -> list[str]:
        problems, size = super().misfits(head, target), head.layers.hidden_size
        if size != target.hidden_size and not head.own_embedding:
            problems.append(f"its hidden size is {size}, and it has no embedding of that size")
        return problems

    def buffers(self, config: Eagle3Config, tensors: HeadTensors, dtype: torch.dtype) -> dict[str, Tensor]:
        read = {"token_of": _read_vocabulary(tensors, config)}
        if config.own_embedding:
            shape = (config.layers.vocab_size, config.layers.hidden_size)
            read["embedding"] = tensors.exactly(EMBEDDING, shape).to(dtype)
        return read

    def buffer_tensors(self, head: Eagle3Head, dtype: torch.dtype) -> dict[str, Tensor]:
        token = head.token_of.cpu()
        flags = torch.zeros(head.config.vocab_size, dtype=torch.bool).scatter_(0, token, True)
        tensors = {"d2t": token - torch.arange(len(token)), "t2d": flags}
        if head.embedding is not None:
            tensors[EMBEDDING] = head.embedding.to("cpu", torch.bfloat16 if dtype == torch.int8 else dtype, copy=True)
        return tensors


def _read_vocabulary(tensors: HeadTensors, config: Eagle3Config) -> Tensor:
    """Returns the target's token for each of the head's. `d2t` holds the differences, `t2d` a flag per target token."""
    size, vocab_size = config.draft_vocab_size, config.layers.vocab_size
    if "d2t" not in tensors:
        if size != vocab_size:
            raise ValueError(f"tensor d2t is missing: it maps the {size} drafted tokens to {vocab_size} of the target")
        return torch.arange(size)
    added = tensors.exactly("d2t", (size,))
    if added.is_floating_point() or added.dtype == torch.bool:
        raise ValueError(f"tensor d2t is stored as {added.dtype}; it must hold whole numbers")
    token = torch.arange(size) + added.long()
    if token.min() < 0 or token.max() >= vocab_size or len(token.unique()) < size:
        raise ValueError(f"tensor d2t does not name {size} different tokens of a vocabulary of {vocab_size}")
    if "t2d" in tensors:
        taken = tensors.exactly("t2d", (vocab_size,)).bool()
        if not torch.equal(taken.nonzero()[:, 0], token.sort().values):
            raise ValueError("tensors d2t and t2d contradict each other")
    return token


def _layer_config(raw: Mapping[str, Any]) -> DecoderConfig:
    layers = config_from_hf({"model_type": "llama", **raw, "tie_word_embeddings": False})
    if layers.num_layers != 1:
        raise ValueError(f"num_hidden_layers is {layers.num_layers}; EAGLE-3 heads have one layer here")
    if layers.moe is not None or any(layers.windows):
        raise ValueError("EAGLE-3 heads with experts or sliding windows are not supported")
    return layers


def _tap_layers(raw: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tapped layers under any of the keys, counted by outputs; empty if there are none."""
    keys = {TAPS: (raw, 1), "aux_hidden_state_layer_ids": (raw, 1), f"eagle_config.{TAPS}": (own, 0)}
    found = {}
    for key, (section, first) in keys.items():
        ids = section.get(key.rpartition(".")[2])
        if ids is None:
            continue
        if not isinstance(ids, list) or len(ids) != EAGLE3_TAPS:
            raise ValueError(f"{key} does not name {EAGLE3_TAPS} layers")
        found[key] = tuple(Fields({key: i}).integer(key, first, MAX_LAYERS) - first for i in ids)
    return agreed(found) or ()


EAGLE3 = Eagle3Format()
