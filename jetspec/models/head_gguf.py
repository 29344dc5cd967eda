"""Drafters of the DFlash family in GGUF files, as the layouts of their authors.

Layers are counted by their inputs, so every number is one more than ours; a map of reduced vocabularies holds target
tokens, not differences. Rows of q and k are as in safetensors: only converters of Llama models permute them for the
rotary pairs of neighbours, and these drafters have Qwen3's pairs of halves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.models.decoder import RopeConfig
from jetspec.models.families import LAYER, Fields, rope_from_gguf, rope_to_hf
from jetspec.models.gguf import PLAIN, GGUFFile, TensorInfo

ARCHITECTURE = "dflash"
PREFIX = f"{ARCHITECTURE}."
KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.causal": "is_causal",
    "attention.sliding_window": "sliding_window",
    "embedding_scale": "input_embedding_scale",
    **{
        key: key
        for key in (
            *("block_size", "sample_from_anchor", "mask_token_id", "vocab_size", "target_hidden_size"),
            *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
            *("markov_rank", "markov_head_type", "confidence_head_with_markov"),
            *("logit_scale", "output_multiplier", "input_embedding_scale", "final_logit_softcapping"),
        )
    },
    "confidence_head": "enable_confidence_head",
}
"""Keys of metadata, with those of config.json."""
OTHER_KEYS = (
    *("target_layers", "attention.sliding_window_pattern", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.dimension_sections", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
"""Keys that are read apart."""
TENSORS = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
LAYER_TENSORS = {
    **{gguf: hf for parts in LAYER.values() for hf, gguf in parts.items()},
    **{f"{short}_conv_base": f"{name}_conv.base_kernel" for short, name in (("attn", "attention"), ("ffn", "mlp"))},
    **{
        f"{short}_conv_proj": f"{name}_conv.kernel_projection"
        for short, name in (("attn", "attention"), ("ffn", "mlp"))
    },
}
"""Stored names of tensors, with the published ones."""


def drafter_kind(path: Path) -> str | None:
    """Returns the architecture of a drafter's file; None: it is none."""
    architecture = str(GGUFFile(path).metadata.get("general.architecture"))
    return architecture if architecture in (ARCHITECTURE, "dflash-draft", "eagle3") else None


def _rope(found: Mapping[str, Any], rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of a rope. Sections say nothing where the first one holds all pairs."""
    if any((found.get("rope.dimension_sections") or [0])[1:]):
        raise ValueError(f"{PREFIX}rope.dimension_sections are not supported")
    theta = rope.theta if "rope.freq_base" in found else None
    return {"rope_theta": theta, "rope_scaling": rope_to_hf(rope)}


def _windows(found: Mapping[str, Any]) -> dict[str, Any]:
    if not found.get("attention.sliding_window"):
        return {"sliding_window": None}
    pattern = found.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        raise ValueError(f"{PREFIX}attention.sliding_window_pattern does not say which layers have windows")
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"layer_types": kinds, "use_sliding_window": True}


def _terms(config: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Returns keys that files leave to the shapes of their tensors."""
    found: dict[str, Any] = {}
    if "d2t" in file:
        found["draft_vocab_size"] = file.shape("d2t")[0]
    if "markov_w1.weight" in file:
        found["markov_rank"] = file.shape("markov_w1.weight")[-1]
        found["enable_confidence_head"] = "conf_proj.weight" in file
    if "conf_proj.weight" in file:
        found["confidence_head_with_markov"] = file.shape("conf_proj.weight")[-1] != config.get("hidden_size")
    return {key: value for key, value in found.items() if config.get(key) is None}


def published(stored: str) -> str:
    """Returns the published name of a tensor; names without one stay."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)(\.weight|\.bias)?", stored):
        number, inner, leaf = match.groups(default="")
        return f"layers.{number}.{LAYER_TENSORS[inner]}{leaf}" if inner in LAYER_TENSORS else stored
    return TENSORS.get(stored, stored)


class DrafterFile(GGUFFile):
    """A drafter's file, read as a safetensors file is: tensors by their published names, dequantised."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored = {published(name): name for name in self.tensors}

    def config(self) -> dict[str, Any]:
        """Returns the metadata of a drafter as a config.json. Keys of other meaning keep their names, to be refused."""
        found = {key.removeprefix(PREFIX): value for key, value in self.metadata.items() if key.startswith(PREFIX)}
        c = Fields(self.metadata, PREFIX)
        config = {KEYS[key]: value for key, value in found.items() if key in KEYS}
        config |= {PREFIX + key: value for key, value in found.items() if key not in (*KEYS, *OTHER_KEYS)}
        if "attention.key_length" in found:
            size = c.size("attention.key_length")
            for key in ("attention.value_length", "rope.dimension_count"):
                if c.size(key, size) != size:
                    raise ValueError(f"{PREFIX}{key} differs from the head size {size}; that is not supported")
        is_selector, is_markov = "selector_hidden.weight" in self, "markov_w1.weight" in self
        kind = "DFlash2DraftModel" if is_selector else "Qwen3DSparkModel" if is_markov else "DFlashDraftModel"
        config |= {"architectures": [kind], "hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in self}
        config |= _rope(found, rope_from_gguf(c)) | _windows(found) | _terms(config, self)
        config.setdefault("mask_token_id", self.metadata.get("tokenizer.ggml.mask_token_id"))
        if not isinstance(taps := found.get("target_layers"), list) or not all(type(i) is int for i in taps):
            raise ValueError(f"{PREFIX}target_layers does not name the tapped layers")
        config["target_layer_ids"] = [i - 1 for i in taps]
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if config.get("vocab_size") is None and isinstance(tokens, list):
            config["vocab_size"] = len(tokens)
        return config

    def keys(self) -> list[str]:
        return list(self.stored)

    def get_slice(self, name: str) -> TensorInfo:
        return self.tensors[self.stored[name]]

    def get_tensor(self, name: str) -> Tensor:
        info = self.get_slice(name)
        dtype = PLAIN.get(info.get_dtype(), torch.int64)
        out = torch.empty(info.shape, dtype=dtype)
        self.read(self.stored[name], out)
        return out - torch.arange(len(out)) if name == "d2t" and dtype == torch.int64 else out
