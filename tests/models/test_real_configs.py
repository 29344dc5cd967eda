"""Contents of config.json as trainers write them, for Qwen3-8B: kind, taps and sizes are read."""

from __future__ import annotations

from typing import Any

import pytest

from jetspec.models.draft_head import EdgeConfig
from jetspec.models.head_folder import kind_of_config
from jetspec.models.heads import FORMATS
from jetspec.models.path_terms import PathConfig

TAPS, MASK = [1, 9, 17, 25, 33], 151669
TARGET: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
IDS = {"mask_token_id": MASK, "target_layer_ids": TAPS}
OLD = TARGET | {"rope_scaling": None, "rope_theta": 1000000}
NEW = TARGET | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "transformers_version": "5.0.0"}
FIVE = {"layer_types": ["full_attention"] * 5, "max_window_layers": 5, "num_hidden_layers": 5, "num_target_layers": 36}
MARKOV = {"markov_rank": 256, "markov_head_type": "vanilla"}
CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
VANILLA = EdgeConfig(256, False, 1.0)
Contents = dict[str, Any]


def specforge(architecture: str, block_size: int, own: Contents) -> Contents:
    names = {"architectures": [architecture], "auto_map": {"AutoModel": f"module.{architecture}"}}
    return OLD | FIVE | names | {"block_size": block_size, "dflash_config": IDS | own}


def deepspec(architecture: str, own: Contents) -> Contents:
    return NEW | FIVE | {"architectures": [architecture], "target_layer_ids": TAPS, "max_window_layers": 36} | own


BLOCK_OF_7 = {"block_size": 7, "mask_token_id": MASK, "num_anchors": 512}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "draft_num_hidden_layers": 1}
TRAINED = {"ttt_length": 7, "step_loss_decay": 0.8, "target_model_name_or_path": "Qwen/Qwen3-8B"}
EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
DOMINO = {"pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True}
DFLY = {"architectures": ["Qwen3DFlyModel"], "block_size": 8, "model_arch": "dflash", "fusion_type": "concat_fc"}
DFLY_SIZES = {"num_target_layers": 5, "target_num_hidden_layers": 36, "target_hidden_size": 4096}
DFLY_TERM = {"enable_hidden_correction": True, "hidden_correction_intermediate_size": None, "gate_temperature": 1.0}
REAL: dict[str, tuple[Contents, str, Contents]] = {
    "z-lab and SpecForge DFlash": (specforge("DFlashDraftModel", 16, {}), "DFlash", {"depth": 15, "edge": None}),
    "SpecForge DSpark": (
        specforge(
            "DSparkDraftModel",
            7,
            MARKOV | CONFIDENT | {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"},
        ),
        "SpecForge DSpark",
        {"depth": 7, "edge": VANILLA, "confidence": "state_and_parent"},
    ),
    "SpecForge DSpark, few keys": (
        specforge("DSparkDraftModel", 7, {"confidence_head_alpha": 1.0, "markov_rank": 256}),
        "SpecForge DSpark",
        {"depth": 7, "edge": VANILLA, "confidence": "state"},
    ),
    "SpecForge Domino": (
        specforge("DominoDraftModel", 16, DOMINO | {"projector_type": "domino"}) | {"emb_dim": 256},
        "Domino",
        {"depth": 16, "path": PathConfig("gru", 256, 1024, 2)},
    ),
    "SpecForge Domino, few keys": (specforge("DominoDraftModel", 16, DOMINO), "Domino", {"depth": 16}),
    "SpecForge EAGLE-3.1": (
        OLD | EAGLE | {"fc_norm": True, "norm_output": True, "draft_vocab_size": 32000, "max_window_layers": 48},
        "EAGLE-3",
        {"depth": 7, "tap_layers": (), "norm_each_tap": True, "norm_output": True, "draft_vocab_size": 32000},
    ),
    "SpecForge P-EAGLE": (
        OLD
        | EAGLE
        | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4, "draft_vocab_size": 32000}
        | {"mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "num_target_layers": 36},
        "P-EAGLE",
        {"depth": 8, "tap_layers": (1, 17, 32), "mask_token": MASK, "draft_vocab_size": 32000},
    ),
    "DeepSpec DSpark": (
        deepspec("Qwen3DSparkModel", BLOCK_OF_7 | MARKOV | CONFIDENT),
        "DSpark",
        {"depth": 7, "edge": VANILLA, "confidence": "state_and_parent"},
    ),
    "DeepSpec DFlash": (
        deepspec("Qwen3DSparkModel", BLOCK_OF_7 | {"markov_rank": 0, "enable_confidence_head": False}),
        "DSpark",
        {"depth": 7, "edge": None, "confidence": None},
    ),
    "DeepSpec EAGLE-3": (
        deepspec("Qwen3Eagle3Model", ONE_LAYER | TRAINED),
        "EAGLE-3",
        {"depth": 7, "draft_vocab_size": 151936},
    ),
    "AngelSlim DFly": (
        OLD | FIVE | IDS | DFLY | DFLY_SIZES | DFLY_TERM,
        "DFly",
        {"depth": 7, "path": PathConfig("corrected", 4096, 4096), "fused_taps": True},
    ),
}
"""Contents by writer, with the kind and some properties. Those of speculators are written by the library itself in
test_published_heads.py."""


@pytest.mark.parametrize("name", REAL)
def test_config_of_a_trainer_is_read(name: str) -> None:
    raw, kind, expected = REAL[name]
    assert kind_of_config(raw) == kind
    config = next(format for format in FORMATS if kind in format.kinds).parse(raw)
    expected = {"tap_layers": tuple(TAPS), **expected}
    if expected["tap_layers"]:
        assert config.num_target_layers == 36
    assert {key: getattr(config, key) for key in expected} == expected
