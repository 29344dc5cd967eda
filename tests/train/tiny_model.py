"""A model small enough to write to disk in a test: bytes for tokens, random weights, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jetspec.models.tokenizer import BYTE_OF, Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_TOKEN = 257
VOCAB = 258
CONTEXT = 256


def byte_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """`words` are tokens of their own, after the others."""
    backend = Backend(models.BPE(dict(BYTE_OF), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (START, END)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in words])
    return Tokenizer(backend, TEMPLATE, {"eos_token": END})


def write_model(folder: Path, words: Sequence[str] = ()) -> Path:
    """A llama of two layers that likes to end its answers."""
    folder.mkdir()
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = {
        **shape,
        "model_type": "llama",
        "vocab_size": VOCAB + len(words),
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(VOCAB + len(words)), folder / "model.safetensors")
    byte_tokenizer(words)._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder


def _weights(vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": random(vocab, 32), "model.norm.weight": torch.ones(32)}
    weights["lm_head.weight"] = random(vocab, 32)
    for i in range(2):
        layer = f"model.layers.{i}"
        sizes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
        sizes |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32)}
        sizes |= {"mlp.down_proj": (32, 64)}
        weights |= {f"{layer}.{name}.weight": random(*size) for name, size in sizes.items()}
        weights |= {
            f"{layer}.{name}.weight": torch.ones(32) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return weights
