"""Configs: old and new spellings are equal, invalid values are one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jetspec.models.decoder import RopeConfig
from jetspec.models.families import config_from_hf, dtype_from_hf, rope_from_hf

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
LLAMA = QWEN3 | {"model_type": "llama"}
MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def new_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Converts a config to the keys of transformers 5."""
    config = dict(config)
    scaling = dict(config.pop("rope_scaling", None) or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
    config["rope_parameters"] = {"rope_type": kind, "rope_theta": config.pop("rope_theta"), **scaling}
    return config


SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_rope_spellings_equal_transformers(scaling: dict[str, Any] | None) -> None:
    old = LLAMA | {"head_dim": 64, "rope_scaling": scaling}
    new = new_spelling(old)
    assert config_from_hf(old).rope == config_from_hf(new).rope
    theirs = AutoConfig.for_model(**new)
    rope, kind = config_from_hf(new).rope, new["rope_parameters"]["rope_type"]
    if kind == "default":
        assert rope == RopeConfig(1e6)
        return
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    torch.testing.assert_close(rope.inv_freq(64), inv_freq, atol=1e-9, rtol=1e-5)
    assert rope.scale == pytest.approx(scale)


def test_defaults() -> None:
    bare = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads", "rope_theta")}
    config = config_from_hf(bare)
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (8, 4, 10_000.0)
    assert config_from_hf({**QWEN3, "head_dim": None}).head_dim == 128
    assert config_from_hf(QWEN3 | {"hidden_size": 30, "head_dim": 8}).head_dim == 8
    assert rope_from_hf(QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}}).original_len == 4096
    mistral = config_from_hf(LLAMA | {"model_type": "mistral", "attention_bias": True, "mlp_bias": True})
    assert not (mistral.qkv_bias or mistral.out_bias or mistral.mlp_bias)
    other = {("num_local_experts" if key == "num_experts" else key): value for key, value in MOE.items()}
    assert config_from_hf(other) == config_from_hf(MOE)


MIXED = ["sliding_attention", "full_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9, "use_sliding_window": False}, ()),
        ({"sliding_window": None, "use_sliding_window": True}, ()),
        ({"model_type": "llama", "sliding_window": 9, "use_sliding_window": True}, ()),
        ({"sliding_window": 9, "use_sliding_window": True, "layer_types": MIXED}, (9, None, None, None)),
        ({"model_type": "mistral", "sliding_window": 9, "layer_types": MIXED}, (9, None, None, None)),
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9, 9)),
    ],
)  # fmt: skip
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_hf(QWEN3 | changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "choose one of llama, mistral, qwen2, qwen3, qwen3_moe"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "choose one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": "yarn"}, "not a table"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}}, "below"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GGUF"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 32.0}, "whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_attention_heads": 1 << 18, "num_key_value_heads": 1 << 18}, "too large"),
        ({"head_dim": 7}, "odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "full_attention"),
        ({"layer_types": ["full_attention"], "use_sliding_window": True}, "each of 4 layers"),
        ({"model_type": "llama", "hidden_size": 30, "head_dim": None}, "not divisible"),
        (MOE | {"num_experts_per_tok": 9}, "only 8 exist"),
    ],
)
def test_invalid_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(QWEN3 | changes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


OTHER_KEYS = ["rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "dtype"]


@given(st.dictionaries(st.sampled_from([*MOE, *OTHER_KEYS, "mlp_only_layers"]), JSON, max_size=3))
@settings(max_examples=100)
def test_any_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    raw = MOE | changes
    try:
        config = config_from_hf(raw)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0
        assert len(config.windows) in (0, config.num_layers)


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ({}, torch.bfloat16),
        ({"dtype": 7}, torch.bfloat16),
    ],
)
def test_dtype(raw: dict[str, Any], dtype: torch.dtype) -> None:
    assert dtype_from_hf(raw) == dtype
