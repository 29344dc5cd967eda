"""Model families, in two tables: how a config is read, and the names of the weights.

Configs are untrusted: every value is checked here, and not again later.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from jetspec.models.decoder import DecoderConfig, MoEConfig, RopeConfig
from jetspec.models.gguf import GGUFFile

Layout = Literal["hf", "gguf"]
MAX_LAYERS, MAX_SIZE, MAX_VOCAB, MAX_LEN, MAX_EXPERTS = 1024, 1 << 20, 1 << 24, 1 << 30, 4096


@dataclass(frozen=True)
class Family:
    """Properties of a family that its config files do not contain."""

    architecture: str
    """Name in GGUF files."""
    biases: Literal["none", "optional", "qkv"] = "none"
    """Attention biases: none, if `attention_bias` is set, or always on q, k and v."""
    mlp_biases: bool = False
    """Use `mlp_bias`."""
    qk_norm: bool = False
    windows: Literal["none", "all", "switched", "layers"] = "none"
    """Layers with a sliding window: none; all, or those that `layer_types` selects; all if `use_sliding_window` is set;
    or if so those that `layer_types` or `max_window_layers` selects."""
    head_dim: int | None = None
    """Default head size. None: hidden size / heads."""
    sparse: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", biases="optional", mlp_biases=True),
    "mistral": Family("llama", windows="all"),
    "qwen2": Family("qwen2", biases="qkv", windows="layers"),
    "qwen3": Family("qwen3", biases="optional", qk_norm=True, windows="layers", head_dim=128),
    "qwen3_moe": Family("qwen3moe", biases="optional", qk_norm=True, windows="switched", sparse=True),
}

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ROPE_KEYS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}


Parts = dict[str, str]
"""Tensors of which a parameter consists, stacked along the rows: names in Hugging Face folders, with those in GGUF."""
TOP: dict[str, Parts] = {
    "embedding": {"model.embed_tokens": "token_embd"},
    "norm": {"model.norm": "output_norm"},
    "lm_head": {"lm_head": "output"},
}
LAYER: dict[str, Parts] = {
    "input_norm": {"input_layernorm": "attn_norm"},
    "attention.qkv": {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    "attention.out": {"self_attn.o_proj": "attn_output"},
    "attention.q_norm": {"self_attn.q_norm": "attn_q_norm"},
    "attention.k_norm": {"self_attn.k_norm": "attn_k_norm"},
    "post_norm": {"post_attention_layernorm": "ffn_norm"},
    "mlp.gate_up": {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    "mlp.down": {"mlp.down_proj": "ffn_down"},
    "mlp.router": {"mlp.gate": "ffn_gate_inp"},
}
EXPERTS: dict[str, Parts] = {
    "mlp.gate_up": {"mlp.experts.{e}.gate_proj": "ffn_gate_exps", "mlp.experts.{e}.up_proj": "ffn_up_exps"},
    "mlp.down": {"mlp.experts.{e}.down_proj": "ffn_down_exps"},
}
STACKED_EXPERTS = {"mlp.gate_up": "mlp.experts.gate_up_proj", "mlp.down": "mlp.experts.down_proj"}
"""Names in folders that store all experts of a layer as one tensor of our shape."""


def pieces(
    config: DecoderConfig, name: str, value: Tensor, layout: Layout, stored: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yields the stored tensors of a parameter, each with its part of `value`. `stored` are the names that exist."""
    is_expert = value.dim() == 3
    module, leaf = (name[:-5], ".bias") if name.endswith(".bias") else (name.removesuffix(".weight"), ".weight")
    prefix, parts = "", TOP.get(module)
    if parts is None:
        _, layer, inner = module.split(".", 2)
        prefix, parts = {"hf": "model.layers.", "gguf": "blk."}[layout] + layer + ".", LAYER[inner]
        if is_expert:
            parts, stacked = EXPERTS[inner], prefix + STACKED_EXPERTS[inner]
            if stacked in stored:
                yield stacked, value
                return
    rows = [value.shape[int(is_expert)] // len(parts)] * len(parts)
    if len(parts) == 3:
        rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    names = parts.keys() if layout == "hf" else parts.values()
    for part, rest in zip(names, value.split(rows, int(is_expert)), strict=True):
        full = prefix + part + leaf
        if is_expert and layout == "hf":
            yield from ((full.format(e=e), expert) for e, expert in enumerate(rest))
        else:
            yield full, rest


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the contents of a `config.json`."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"model family {_short(name)} is not supported; choose one of {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantised safetensors (quantization_config) are not supported; use the original model or a GGUF file"
        )
    family, c = FAMILIES[name], Fields(raw)
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {_short(raw['hidden_act'])} is not supported; the families use silu")
    hidden_size, num_heads = c.size("hidden_size"), c.size("num_attention_heads")
    num_layers = c.integer("num_hidden_layers", 1, MAX_LAYERS)
    has_bias = family.biases == "optional" and c.flag("attention_bias")
    experts = "num_experts" if "num_experts" in raw else "num_local_experts"
    sizes = (experts, "num_experts_per_tok", "moe_intermediate_size")
    moe = _moe(c, *sizes, normalize=c.flag("norm_topk_prob")) if family.sparse else None
    return check_config(
        DecoderConfig(
            family=name,
            vocab_size=c.integer("vocab_size", 1, MAX_VOCAB),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=c.size("num_key_value_heads", num_heads),
            head_dim=_head_dim(c, "head_dim", family.head_dim, hidden_size, num_heads),
            inner_size=c.size("intermediate_size"),
            max_len=c.integer("max_position_embeddings", 1, MAX_LEN),
            norm_eps=c.real("rms_norm_eps", 0, 1, 1e-6),
            rope=rope_from_hf(raw),
            qkv_bias=family.biases == "qkv" or has_bias,
            out_bias=has_bias,
            mlp_bias=family.mlp_biases and c.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            tied_embedding=c.flag("tie_word_embeddings"),
            windows=windows_from_hf(family.windows, raw, num_layers),
            moe=moe,
            moe_layers=_moe_layers(c, raw, num_layers) if moe else (),
        )
    )


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Reads the header of a GGUF file."""
    architecture = str(file.metadata.get("general.architecture"))
    names = {family.architecture: name for name, family in reversed(FAMILIES.items())}
    if architecture not in names:
        raise ValueError(f"GGUF architecture {_short(architecture)} is not supported; choose one of {', '.join(names)}")
    family, c = FAMILIES[names[architecture]], Fields(file.metadata, prefix=f"{architecture}.")
    if not family.sparse and c.integer("expert_count", 0, MAX_SIZE, 0):
        raise ValueError(f"mixtures of experts are not supported in GGUF architecture {architecture}")
    if "token_embd.weight" not in file:
        raise ValueError("tensor token_embd.weight is missing")
    hidden_size, num_heads = c.size("embedding_length"), c.size("attention.head_count")
    num_layers = c.integer("block_count", 1, MAX_LAYERS)
    head_dim = _head_dim(c, "attention.key_length", None, hidden_size, num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if c.size(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key} differs from the head size {head_dim}; that is not supported")
    sizes = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    moe_layers = tuple(i for i in range(num_layers) if family.sparse and f"blk.{i}.ffn_gate_inp.weight" in file)
    return check_config(
        DecoderConfig(
            family=names[architecture],
            vocab_size=file.shape("token_embd.weight")[0],
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=c.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            inner_size=c.size("feed_forward_length"),
            max_len=c.integer("context_length", 1, MAX_LEN),
            norm_eps=c.real("attention.layer_norm_rms_epsilon", 0, 1),
            rope=replace(rope_from_gguf(c), divisors=_divisors(file, head_dim)),
            qkv_bias="blk.0.attn_q.bias" in file,
            out_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_down.bias" in file,
            qk_norm=family.qk_norm,
            tied_embedding="output.weight" not in file,
            # GGUF has no key for `normalize`; all published qwen3_moe models do.
            moe=_moe(c, *sizes, normalize=True) if moe_layers else None,
            moe_layers=moe_layers,
        )
    )


def dtype_from_hf(raw: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype that a config names, else bf16."""
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return known.get(str(raw.get("dtype") or raw.get("torch_dtype")), torch.bfloat16)


def rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise ValueError("rope_parameters is not a table")
    if tables := [key for key, value in nested.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope_parameters has a table for {tables[0]}; one rope for each kind of layer is not supported"
        )
    outer, c = Fields(raw), Fields(nested)
    kind = nested.get("rope_type", nested.get("type", "default"))
    _check_kind(kind)
    max_len = outer.integer("max_position_embeddings", 1, MAX_LEN)
    if any(each.real("partial_rotary_factor", 0, 1, 1.0) != 1 for each in (c, outer)):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = c.real("rope_theta", 1, 1e12, outer.real("rope_theta", 1, 1e12, 10_000.0))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, c.real("factor", 1e-3, 1e6))
    lengths = [each.integer("original_max_position_embeddings", 1, MAX_LEN, max_len) for each in (outer, c)]
    if lengths[0] != lengths[1] and max_len not in lengths:
        raise ValueError(f"original_max_position_embeddings is {lengths[0]} and {lengths[1]}")
    original_len = next((length for length in lengths if length != max_len), max_len)
    default = max_len / original_len if kind == "yarn" and original_len != max_len else None
    factor = c.real("factor", 1e-3, 1e6, default)
    if kind == "llama3":
        low, high = (c.real(key, 0, 1e6, getattr(RopeConfig, key)) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeConfig(theta, kind, factor, original_len, low, high)
    if not c.flag("truncate", True):
        raise ValueError("truncate false is not supported in yarn")
    fast, slow = (c.real(key, 0, 1e6, getattr(RopeConfig, key)) for key in ("beta_fast", "beta_slow"))
    stretch = _attention_factor(c, factor)
    return RopeConfig(theta, kind, factor, original_len, beta_fast=fast, beta_slow=slow, attention_factor=stretch)


def windows_from_hf(rule: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window per layer; empty: none."""
    c = Fields(raw)
    has_windows = rule == "all" or (rule in ("switched", "layers") and c.flag("use_sliding_window"))
    if not has_windows or raw.get("sliding_window", 4096) is None:
        return ()
    window = c.integer("sliding_window", 1, MAX_LEN, 4096)
    kinds = raw.get("layer_types")
    if rule == "switched" or (rule == "all" and kinds is None):
        return (window,) * num_layers
    if kinds is None:
        first = c.integer("max_window_layers", 0, MAX_LAYERS, 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise ValueError(f"layer_types must name one of {', '.join(allowed)} for each of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_config(config: DecoderConfig) -> DecoderConfig:
    """Checks relations between values, each of which was checked as it was read."""
    c, rope = config, config.rope
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError("rope low_freq_factor must be below high_freq_factor")
    if rope.kind == "yarn" and (rope.theta <= 1 or min(rope.beta_fast, rope.beta_slow) <= 0):
        raise ValueError("yarn needs rope_theta above 1 and positive beta_fast and beta_slow")
    if c.num_heads % c.num_kv_heads:
        raise ValueError(f"{c.num_heads} heads cannot share {c.num_kv_heads} key/value heads evenly")
    if c.head_dim % 2:
        raise ValueError(f"head size {c.head_dim} is odd; rotary positions need pairs")
    if c.num_heads * c.head_dim > MAX_SIZE or c.vocab_size > MAX_VOCAB:
        raise ValueError("the config describes a model that is too large")
    if c.moe and c.moe.num_chosen > c.moe.num_experts:
        raise ValueError(f"{c.moe.num_chosen} experts per token, but only {c.moe.num_experts} exist")
    return config


class Fields:
    """Checked reads from an untrusted table. Values without a default are required."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw, self.prefix = raw, prefix

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{self.prefix}{key} is {_short(value)}; it must be a whole number from {low} to {high}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self.integer(key, 1, MAX_SIZE, default)

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{self.prefix}{key} is {_short(value)}; it must be a number from {low} to {high}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.prefix}{key} is {_short(value)}; it must be true or false")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(self.prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.prefix}{key} is missing from the model's config")
        return value


def _moe(c: Fields, experts: str, chosen: str, inner: str, normalize: bool) -> MoEConfig:
    """Reads sizes under these keys."""
    return MoEConfig(c.integer(experts, 1, MAX_EXPERTS), c.integer(chosen, 1, MAX_EXPERTS), c.size(inner), normalize)


def _moe_layers(c: Fields, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    step, dense = c.integer("decoder_sparse_step", 1, MAX_LAYERS, 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError("mlp_only_layers is not a list")
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    """Returns `rope_scaling` of a config.json, which has `rope_theta` beside it."""
    if rope.divisors:
        raise ValueError("a config.json cannot hold a factor for each rotary frequency")
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_len:
        scaling["original_max_position_embeddings"] = rope.original_len
    return scaling | {name: getattr(rope, name) for name in ROPE_KEYS.get(rope.kind, ())}


def rope_from_gguf(c: Fields) -> RopeConfig:
    theta = c.real("rope.freq_base", 1, 1e12, 10_000.0)
    kind = c.raw.get(f"{c.prefix}rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    _check_kind(kind, ("linear", "yarn"))
    factor = c.real("rope.scaling.factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_len=c.integer("rope.scaling.original_context_length", 1, MAX_LEN),
        beta_fast=c.real("rope.scaling.yarn_beta_fast", 0, 1e6, 32.0),
        beta_slow=c.real("rope.scaling.yarn_beta_slow", 0, 1e6, 1.0),
        attention_factor=c.real("rope.scaling.attn_factor", 0, 1e6, 1.0) * _stretch(factor),
    )


def _attention_factor(c: Fields, factor: float) -> float | None:
    """Returns YaRN's factor on cos and sin if a config overrides it."""
    if c.raw.get("attention_factor") is not None:
        return c.real("attention_factor", 0, 1e6)
    mscale, all_dim = c.real("mscale", 0, 1e6, 0.0), c.real("mscale_all_dim", 0, 1e6, 0.0)
    return _stretch(factor, mscale) / _stretch(factor, all_dim) if mscale and all_dim else None


def _stretch(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """Reads the divisors of the rotary frequencies, which converters store as a tensor for Llama 3."""
    if "rope_freqs.weight" not in file:
        return ()
    if file.shape("rope_freqs.weight") != (head_dim // 2,):
        raise ValueError(f"tensor rope_freqs.weight does not have one number per frequency, {head_dim // 2}")
    divisors = torch.empty(head_dim // 2)
    file.read("rope_freqs.weight", divisors)
    if not (divisors.isfinite() & (divisors > 0)).all():
        raise ValueError("tensor rope_freqs.weight has a number that is not positive")
    return tuple(divisors.tolist())


def _check_kind(kind: object, known: tuple[str, ...] = ROPE_KINDS) -> None:
    if kind not in known:
        raise ValueError(f"rope kind {_short(kind)} is not supported; choose one of {', '.join(known)}")


def _head_dim(c: Fields, key: str, default: int | None, hidden_size: int, num_heads: int) -> int:
    if default or c.raw.get(c.prefix + key) is not None:
        return c.size(key, default)
    if hidden_size % num_heads:
        raise ValueError(f"hidden size {hidden_size} is not divisible by {num_heads} heads")
    return hidden_size // num_heads


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
