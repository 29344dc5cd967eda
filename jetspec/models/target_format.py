"""Writes a target as a Hugging Face folder that other engines load: config, weights and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jetspec.files import whole_folder
from jetspec.models.decoder import DecoderConfig
from jetspec.models.families import config_from_hf
from jetspec.models.head_folder import layer_fields
from jetspec.models.tensor_files import CONFIG_FILE, WEIGHTS_FILE, write_json, write_tensors
from jetspec.models.tokenizer import TOKENIZER_FILES
from jetspec.models.weights import Target, hf_tensors

GENERATION_FILE = "generation_config.json"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, GENERATION_FILE, *TOKENIZER_FILES)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def save_target(target: Target, folder: str | Path, dtype: torch.dtype) -> None:
    """Writes a target, dequantised, to a folder that appears complete or not at all."""
    config = write_config(target.decoder.config, dtype)
    ends: dict[str, Any] = {"eos_token_id": sorted(target.eos_tokens)}
    if target.tokenizer.bos_token is not None:
        ends["bos_token_id"] = target.tokenizer.bos_token
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in hf_tensors(target.decoder)}
    with whole_folder(Path(folder), OWN_FILES) as fresh:
        write_json(fresh / CONFIG_FILE, {**config, **ends})
        write_json(fresh / GENERATION_FILE, ends)
        target.tokenizer.save(fresh)
        write_tensors(tensors, fresh / WEIGHTS_FILE)


def write_config(c: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the contents of config.json; ValueError if they would not be read as the same model."""
    out = {
        "architectures": [ARCHITECTURES[c.family]],
        "model_type": c.family,
        **layer_fields(c, dtype),
        "tie_word_embeddings": c.tied_embedding,
        "mlp_bias": c.mlp_bias,
        **_windows(c),
        **_mixture(c),
    }
    if (read := config_from_hf(out)) != c:
        wrong = [name for name in vars(c) if getattr(read, name) != getattr(c, name)]
        raise ValueError(f"a Hugging Face config of family {c.family} cannot express its {', '.join(wrong)}")
    return out


def _windows(c: DecoderConfig) -> dict[str, Any]:
    window = next((window for window in c.windows if window is not None), None)
    if c.family == "mistral":
        return {"sliding_window": window}
    if not c.family.startswith("qwen") or window is None:
        return {}
    kinds = ["sliding_attention" if c.window(i) else "full_attention" for i in range(c.num_layers)]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _mixture(c: DecoderConfig) -> dict[str, Any]:
    if c.moe is None:
        return {}
    return {
        "num_experts": c.moe.num_experts,
        "num_experts_per_tok": c.moe.num_chosen,
        "moe_intermediate_size": c.moe.inner_size,
        "norm_topk_prob": c.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(c.num_layers) if i not in c.moe_layers],
    }
