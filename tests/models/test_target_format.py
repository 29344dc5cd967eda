"""A target saved as a Hugging Face folder is the same model, here and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from jetspec.models.decoder import Decoder, DecoderConfig, MoEConfig, RopeConfig
from jetspec.models.export import save_target, write_target_config
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import Target, load_target
from tests.engine.tiny import randomize
from tests.models.paged import run_decoder
from tests.models.test_tokenizer import BACKEND

LLAMA3 = RopeConfig(theta=500.0, kind="llama3", factor=4.0, original_len=16)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"rope": LLAMA3},
    "mistral": {"windows": (5, 5)},
    "qwen2": {"qkv_bias": True, "tied_embedding": True},
    "qwen3": {"qk_norm": True, "windows": (None, 4)},
    "qwen3_moe": {"qk_norm": True, "moe": MoEConfig(4, 2, 12, True), "moe_layers": (1,)},
}


def tiny_target(family: str) -> Target:
    tokenizer = Tokenizer(BACKEND, "{{ messages[0].content }}", {"eos_token": "</s>", "bos_token": "<s>"})
    size = max(tokenizer.vocab_size, 40)
    config = DecoderConfig(family, size, 32, 2, 4, 2, 8, 48, max_len=64, **SHAPES[family])
    decoder, generator = randomize(Decoder(config), 0, 0.2), torch.Generator().manual_seed(1)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.normal_(1.0, 0.2, generator=generator)  # none is like another
    return Target(decoder, tokenizer, tokenizer.eos_tokens, family, Path(family))


def logits(decoder: Decoder) -> torch.Tensor:
    return run_decoder(decoder, list(range(1, 30)))[0]


@pytest.mark.parametrize("family", SHAPES)
def test_saved_target_is_the_same_model(family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    save_target(target, tmp_path / "model", torch.float32)
    again = load_target(tmp_path / "model", torch.float32)
    assert again.decoder.config == target.decoder.config and again.eos_tokens == target.eos_tokens
    assert torch.equal(logits(again.decoder), logits(target.decoder))
    assert again.tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        found = theirs(torch.arange(1, 30)[None]).logits[0]
    torch.testing.assert_close(found, logits(target.decoder), atol=1e-4, rtol=1e-4)


def test_inexpressible_config_is_refused() -> None:
    config = DecoderConfig("llama", 40, 32, 2, 4, 2, 8, 48, max_len=64, windows=(4, 4))
    with pytest.raises(ValueError, match="windows"):
        write_target_config(config, torch.float32)


@pytest.mark.model
def test_transformers_reads_the_default_model(tmp_path: Path) -> None:
    target = load_target(DEFAULT_MODEL, torch.float32)
    save_target(target, tmp_path / "model", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    ours = target.tokenizer.encode_chat(chat)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ours
    assert tokenizer.decode(ours) == target.tokenizer.decode(ours, skip_special=False)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert set(config.eos_token_id) == target.eos_tokens and config.rope_parameters["rope_theta"] == 100000.0
