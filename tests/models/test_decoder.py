"""Every family equals transformers in logits and taps on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jetspec.models.weights import load_decoder, open_model
from tests.models.paged import run_decoder

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("llama", {"head_dim": 16}),
    "llama linear": ("llama", rope(rope_type="linear", factor=3.0)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 yarn": ("qwen3", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "qwen3 yarn factors": (
        "qwen3",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0,
             attention_factor=1.3),
    ),
    "qwen3 layer types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "attention_bias": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe raw weights": ("qwen3_moe", MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_moe steps": (
        "qwen3_moe", MOE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}
    ),
}  # fmt: skip


def make_model(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """Returns a model with random weights, norms and biases: a weight that is not loaded shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | changes))).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


def run_model(model: PreTrainedModel, tokens: list[int], tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns logits and outputs of layers. What transformers calls the last hidden state is behind the final norm: the
    tap after the last layer."""
    taps: dict[int, Tensor] = {}
    layers = list(enumerate(model.model.layers))
    hooks = [layer.register_forward_hook(lambda _, __, out, i=i: taps.update({i: out})) for i, layer in layers]
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    taps[len(layers)] = out.hidden_states[len(layers)]
    return out.logits[0], torch.cat([taps[i][0] for i in tap_layers], -1)


def assert_same(path: Path, model: PreTrainedModel, tap_layers: tuple[int, ...] = (0, 2, 1, 3)) -> None:
    tokens = torch.randint(0, 61, (23,), generator=torch.Generator().manual_seed(7)).tolist()
    logits, taps = run_decoder(load_decoder(open_model(path)), tokens, tap_layers)
    expected_logits, expected_taps = run_model(model, tokens, tap_layers)
    torch.testing.assert_close(taps, expected_taps, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_decoder_equals_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(*CASES[case])
    model.save_pretrained(tmp_path)
    assert_same(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_shards_equal_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family, MOE if family == "qwen3_moe" else {})
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(tmp_path, model)
