"""Drafters in GGUF files compute what the modules of their authors do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from jetspec.models.describe import describe
from jetspec.models.draft_head import DraftHead
from jetspec.models.heads import load_any_head
from tests.models.gguf_files import write_gguf
from tests.models.peers import HIDDEN, MASK, TAPS, VOCAB, Peer
from tests.models.test_config_keys import TARGET
from tests.models.test_published_heads import PEERS, assert_equal_to

NAMES = {
    r"layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"layers\.(\d+)\.self_attn\.([qk])_norm": r"blk.\1.attn_\2_norm",
    r"layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blk.\1.ffn_\2",
    r"layers\.(\d+)\.attention_conv\.base_kernel": r"blk.\1.attn_conv_base",
    r"layers\.(\d+)\.mlp_conv\.base_kernel": r"blk.\1.ffn_conv_base",
    r"layers\.(\d+)\.attention_conv\.kernel_projection": r"blk.\1.attn_conv_proj",
    r"layers\.(\d+)\.mlp_conv\.kernel_projection": r"blk.\1.ffn_conv_proj",
    r"hidden_norm\.": "enc.output_norm.",
    r"^norm\.": "output_norm.",
    r"lm_head\.": "output.",
    r"embed_tokens\.": "token_embd.",
    r"markov_head\.": "",
    r"confidence_head\.proj": "conf_proj",
    r"candidate_selector\.predecessor_codebook(\.weight)?": "selector_predecessor.weight",
    r"candidate_selector\.successor_codebook(\.weight)?": "selector_successor.weight",
    r"candidate_selector\.hidden_projection": "selector_hidden",
}
"""Names of llama.cpp's converter."""
FIELDS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": 24,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1000.0,
    "block_size": 5,
    "target_layers": [layer + 1 for layer in TAPS],
}
READ = [
    *("dflash", "dflash windowed", "dflash open windows", "dflash anchor first", "dflash reduced"),
    *("dspark", "dspark fill-in", "dspark reduced", "dspark confident", "dspark confident by parent"),
    *("dflash2", "dflash2 three taps"),
]


def write_drafter(peer: Peer, folder: Path, quantised: Any = (), **changes: Any) -> Path:
    """Writes a peer as llama.cpp's converter does; a change to None leaves a key out."""
    peer.save(folder)
    raw = json.loads((folder / "config.json").read_text())
    fields = {**FIELDS, "sample_from_anchor": raw.get("sample_from_anchor", False)}
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank"):
        if key in raw:
            fields[key] = raw[key]
    layers = raw["transformer_layer_config"]
    if layers.get("use_sliding_window"):
        fields["attention.sliding_window"] = layers["sliding_window"]
        pattern = [kind == "sliding_attention" for kind in layers["layer_types"]]
        fields["attention.sliding_window_pattern"] = pattern
        fields["attention.causal"] = False if raw["sliding_window_non_causal"] else None
    if raw.get("enable_confidence_head"):
        fields |= {"confidence_head": True, "confidence_head_with_markov": raw["confidence_head_with_markov"]}
    tensors, types = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.startswith("verifier") or name == "t2d" or (name == "lm_head.weight" and peer.model.d2t is None):
            continue
        for pattern_, stored in NAMES.items():
            name = re.sub(pattern_, stored, name)
        if name == "d2t":
            value = value.long() + torch.arange(len(value))
        tensors[name] = value.numpy().copy()
        if name in quantised:
            types[name] = Type.Q8_0
            tensors[name] = gguf.quantize(tensors[name], Type.Q8_0)
    extra = {"tokenizer.ggml.mask_token_id": MASK, "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)]}
    fields = {key: value for key, value in (fields | changes).items() if value is not None}
    return write_gguf(folder / "head.gguf", tensors, fields, "dflash", types, extra)


@pytest.mark.parametrize("name", READ)
def test_drafter_computes_what_its_module_does(name: str, tmp_path: Path) -> None:
    peer = Peer.make(**PEERS[name])
    file = write_drafter(peer, tmp_path)
    head = load_any_head(file, TARGET)
    assert isinstance(head, DraftHead) and head.head_config.tap_layers == TAPS
    assert_equal_to(peer, tmp_path, head)
    facts = describe(file)
    assert facts["kind"] == "head" and facts["tap_layers"] == list(TAPS) and facts["mask_token"] == MASK
    assert facts["format"].endswith("(GGUF)") and "problem" not in facts
    assert facts["parameters"] == sum(parameter.numel() for parameter in head.parameters())


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    peer = Peer.make("dflash")
    fc = peer.model.fc.weight
    file = write_drafter(peer, tmp_path, quantised=("fc.weight",))
    fc.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(fc.numpy(), Type.Q8_0), Type.Q8_0)))
    head = load_any_head(file)
    assert isinstance(head, DraftHead) and head.fc.weight.dtype == torch.float32
    assert_equal_to(peer, tmp_path, head)
    assert load_any_head(file, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16


def test_anchor_is_sampled_by_default_in_dspark_only(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {"dflash": {}, "dspark": {"markov_rank": 6}}
    for kind, settings in kinds.items():
        file = write_drafter(Peer.make(kind, **settings), tmp_path, sample_from_anchor=None)
        head = load_any_head(file)
        assert isinstance(head, DraftHead) and head.head_config.shifted == (kind == "dspark")


SCALES = {
    **dict.fromkeys(("logit_scale", "output_multiplier"), "output_scale"),
    **dict.fromkeys(("embedding_scale", "input_embedding_scale"), "embedding_scale"),
    "final_logit_softcapping": "softcap",
}


@pytest.mark.parametrize("key", SCALES)
def test_scales_are_read(key: str, tmp_path: Path) -> None:
    head = load_any_head(write_drafter(Peer.make("dflash"), tmp_path, **{key: 0.5}))
    assert getattr(head.head_config, SCALES[key]) == 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("an_unknown_key", 1),
        ("attention.value_length", 16),
        ("attention.sliding_window", 16),  # without a pattern
        ("rope.dimension_count", 4),
        ("rope.dimension_sections", [2, 2, 0, 0]),
        ("rope.partial_factor", 0.5),
        ("target_layers", None),
        ("target_layers", [0, 2]),
        ("rope.freq_base", None),
        ("conv_group_size", 4),
        ("markov_rank", 4),
        ("attention.causal", 1),
        ("hyper_connection.count", 4),
    ],
)
def test_key_that_changes_the_numbers_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    file = write_drafter(Peer.make("dflash"), tmp_path, **{key: value})
    word = {"target_layers": "target_layer", "rope.freq_base": "rope_theta", "attention.causal": "is_causal"}
    with pytest.raises(ValueError, match=word.get(key, key)) as error:
        load_any_head(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_stretched_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
    peer = Peer.make("dflash", layers={"rope_parameters": rope})
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    file = write_drafter(peer, tmp_path, **{f"rope.scaling.{key}": value for key, value in scaling.items()})
    head = load_any_head(file)
    assert isinstance(head, DraftHead)
    assert_equal_to(peer, tmp_path, head)


@pytest.mark.parametrize("damage", ["blk.9.attn_q.weight", "attn_sinks.weight", "fc.weight", "d2t"])
def test_other_tensors_are_refused(damage: str, tmp_path: Path) -> None:
    file = write_drafter(Peer.make("dflash"), tmp_path)
    extra = {"tokenizer.ggml.mask_token_id": MASK, "tokenizer.ggml.tokens": ["t"] * VOCAB}
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    tensors[damage] = np.arange(5, dtype=np.int64) if damage in ("fc.weight", "d2t") else np.ones((5, 5), np.float32)
    write_gguf(file, tensors, FIELDS, "dflash", None, extra)
    name = {"blk.9.attn_q.weight": "layers.9", "d2t": "lm_head"}.get(damage, damage)
    with pytest.raises(ValueError, match=name):
        load_any_head(file)
