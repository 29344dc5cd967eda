"""EAGLE-3 heads in files: saving and loading, other layouts, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jetspec.engine.llm import LLM
from jetspec.models.decoder import DecoderConfig, RopeConfig
from jetspec.models.describe import describe, fits
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head, eagle3_tap_layers
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.head_format import load_head
from jetspec.models.heads import load_any_head
from jetspec.types import SamplingParams
from tests.models.test_head_format import Json, Tensors, edit_config, edit_tensors
from tests.train.tiny_model import VOCAB, write_model

LAYER = DecoderConfig("llama", 40, 16, 1, 4, 2, 8, 24, max_len=128, rope=RopeConfig(theta=5000.0))
PLAIN = Eagle3Config(LAYER, (1, 2, 4), draft_vocab_size=11, num_target_layers=8)
HEADS = {
    "plain": PLAIN,
    "whole_vocabulary": replace(PLAIN, draft_vocab_size=40),
    "own_embedding": replace(PLAIN, own_embedding=True),
    "other_target_size": replace(PLAIN, own_embedding=True, target_hidden_size=12),
    "norm_first": replace(PLAIN, norm_before_residual=True, depth=3),
    "qwen3": replace(PLAIN, layers=replace(LAYER, family="qwen3", qk_norm=True)),
    "biased": replace(PLAIN, layers=replace(LAYER, qkv_bias=True, out_bias=True, mlp_bias=True)),
}
TARGET = replace(LAYER, num_layers=8, num_heads=2, inner_size=20)


def random_eagle3(config: Eagle3Config, seed: int = 0) -> Eagle3Head:
    head, generator = Eagle3Head(config), torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(0.3, 0.3, generator=generator)
    if head.embedding is not None:
        head.embedding.normal_(generator=generator)
    tokens = torch.randperm(config.layers.vocab_size, generator=generator)[: config.draft_vocab_size]
    head.token_of.copy_(tokens.sort().values)
    return head.requires_grad_(False).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    EAGLE3.save(random_eagle3(PLAIN), tmp_path / "head", torch.float32)
    return tmp_path / "head"


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def assert_same(a: Eagle3Head, b: Eagle3Head) -> None:
    assert a.head_config == b.head_config
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def load(folder: Path, target: DecoderConfig | None = None) -> Eagle3Head:
    head = load_any_head(folder, target)
    assert isinstance(head, Eagle3Head)
    return head


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS.keys())
def test_saved_head_is_loaded_again(config: Eagle3Config, tmp_path: Path) -> None:
    head = random_eagle3(config)
    EAGLE3.save(head, tmp_path / "head", torch.float32)
    assert_same(load(tmp_path / "head"), head)


@pytest.mark.parametrize("names", [["LlamaForCausalLMEagle3"], ["LlamaForCausalLM"], None])
def test_layout_is_detected_by_name_or_vocabulary(names: list[str] | None, folder: Path) -> None:
    edit_config(folder, lambda raw: raw.update(architectures=names))
    assert_same(load(folder), random_eagle3(PLAIN))


def test_saved_layout_is_the_published_one(folder: Path) -> None:
    stored, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    attention = {f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"}
    mlp = {f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    norms = {f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    assert stored.keys() == attention | mlp | norms | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * 16)
    assert stored["fc.weight"].shape == (16, 3 * 16)
    own = torch.arange(11)
    assert torch.equal(own + stored["d2t"], stored["t2d"].nonzero()[:, 0])
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["draft_vocab_size"] == 11
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def to_speculators(folder: Path) -> None:
    """Rewrites a folder in the layout of speculators."""
    raw = json.loads((folder / "config.json").read_text())
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    outer = (*switches, "draft_vocab_size", "num_target_layers", "eagle_aux_hidden_state_layer_ids")
    config: Json = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    config |= {"transformer_layer_config": without(raw, *outer, "eagle_config", "architectures")}
    (folder / "config.json").write_text(json.dumps(config | {key: raw[key] for key in outer}))
    edit_tensors(folder, lambda t: {name.replace("midlayer.", "layers.0."): value for name, value in t.items()})


def test_speculators_layout_is_equal(folder: Path) -> None:
    to_speculators(folder)
    assert_same(load(folder), random_eagle3(PLAIN))


DEEPSPEC = replace(HEADS["qwen3"], tap_layers=(0, 1, 2, 4, 5), draft_vocab_size=40, own_embedding=True, depth=7)


def write_deepspec(folder: Path) -> None:
    """Writes a head as DeepSpec does."""
    EAGLE3.save(random_eagle3(DEEPSPEC), folder, torch.float32)
    layers = EAGLE3.write_config(DEEPSPEC, torch.float32)
    ours = ("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "norm_before_residual")
    own: Json = {"architectures": ["Qwen3Eagle3Model"], "layer_types": ["full_attention"], "draft_num_hidden_layers": 1}
    own |= {"target_layer_ids": [0, 1, 2, 4, 5], "ttt_length": 7, "step_loss_decay": 0.8}
    own["target_model_name_or_path"] = "Qwen/Qwen3-8B"
    layers = without(layers, *ours, "norm_before_fc", "fc_norm", "norm_output", "mlp_bias")
    (folder / "config.json").write_text(json.dumps(layers | own))
    edit_tensors(
        folder, lambda t: {name.replace("midlayer.", "layers.0."): t[name] for name in without(t, "d2t", "t2d")}
    )


def test_deepspec_layout_is_equal(tmp_path: Path) -> None:
    write_deepspec(tmp_path)
    assert_same(load(tmp_path), random_eagle3(DEEPSPEC))


def test_default_tap_layers_are_the_published_ones(folder: Path) -> None:
    """Inputs of layers 2, N / 2 and N - 3."""
    assert eagle3_tap_layers(36) == (1, 17, 32)
    edit_config(folder, lambda raw: (raw.pop("eagle_config"), raw.pop("eagle_aux_hidden_state_layer_ids")))
    assert load(folder).head_config.tap_layers == eagle3_tap_layers(8) == (1, 3, 4)
    edit_config(folder, lambda raw: raw.pop("num_target_layers"))
    assert load(folder, TARGET).head_config.tap_layers == (1, 3, 4)
    with pytest.raises(ValueError, match="load it together with its target"):
        load(folder)
    assert describe(folder)["tap_layers"] == "as the target decides"


CONFIG_DAMAGE: dict[str, Json] = {
    "num_hidden_layers": {"num_hidden_layers": 2},
    "draft_num_hidden_layers": {"draft_num_hidden_layers": 2},
    "layer_types": {"layer_types": ["sliding_attention"]},
    "contradictory": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    "draft_vocab_size": {"draft_vocab_size": 41},
}
TENSOR_DAMAGE: dict[str, Callable[[Tensors], Tensors]] = {
    "tensor d2t is missing": lambda t: without(t, "d2t"),
    "d2t is stored as torch.float32": lambda t: {**t, "d2t": t["d2t"].float()},
    "does not name 11 different tokens": lambda t: {**t, "d2t": t["d2t"] + 40},
    "does not name 11 different": lambda t: {**t, "d2t": -torch.arange(11)},
    "contradict each other": lambda t: {**t, "t2d": ~t["t2d"]},
    "tensor verifier_lm_head.weight has shape": lambda t: {**t, "verifier_lm_head.weight": torch.zeros(13, 16)},
    "tensor embed_tokens.weight has shape": lambda t: {**t, "embed_tokens.weight": torch.zeros(40, 12)},
}


@pytest.mark.parametrize("message", [*CONFIG_DAMAGE, *TENSOR_DAMAGE])
def test_damaged_head_is_refused(message: str, folder: Path) -> None:
    if message in CONFIG_DAMAGE:
        edit_config(folder, lambda raw: raw.update(CONFIG_DAMAGE[message]))
    else:
        edit_tensors(folder, TENSOR_DAMAGE[message])
    with pytest.raises(ValueError, match=message):
        load_any_head(folder)


def test_block_head_loader_refuses_eagle3(folder: Path) -> None:
    with pytest.raises(ValueError, match="EAGLE-3"):
        load_head(folder)


def test_llm_runs_an_eagle3_folder(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    layer = DecoderConfig("llama", VOCAB, 32, 1, 4, 2, 8, 64, max_len=256)
    EAGLE3.save(random_eagle3(Eagle3Config(layer, (0, 0, 1), 100, last_tap="raw")), tmp_path / "head")
    assert fits(describe(model), describe(tmp_path / "head")) == []
    llm = LLM(model, tmp_path / "head", device="cpu")
    assert llm.drafter == "head" and isinstance(llm.head, Eagle3Head)
    sampling, prompts = SamplingParams(max_tokens=20), ["hello there", "a"]
    expected = LLM(model, drafter="none", device="cpu").generate(prompts, sampling)
    assert [c.token_ids for c in llm.generate(prompts, sampling)] == [c.token_ids for c in expected]
