"""Folders of safetensors: loading, and refusal of damaged or hostile files."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.models.describe import describe, fits
from jetspec.models.weights import INDEX, load_decoder, load_target, open_model
from tests.models.paged import run_decoder
from tests.models.test_decoder import make_model
from tests.models.test_head_format import edit_config, edit_tensors
from tests.models.test_tokenizer import BACKEND, write_folder


def save_model(folder: Path, family: str = "llama", shards: bool = False, **changes: Any) -> Path:
    make_model(family, changes).save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return folder


def test_stored_output_matrix_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    """Like transformers."""
    stored = load_file(save_model(tmp_path, tie_word_embeddings=True) / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    for own, is_tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file(stored | {"lm_head.weight": own}, tmp_path / "model.safetensors")
        decoder = load_decoder(open_model(tmp_path))
        assert (decoder.lm_head is decoder.embedding) == is_tied
        assert torch.equal(decoder.lm_head, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loaded_decoder_is_ready_to_run(dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = load_decoder(open_model(save_model(tmp_path, tie_word_embeddings=True)), dtype)
    assert {parameter.dtype for parameter in decoder.parameters()} == {dtype}
    assert decoder.inv_freq.dtype == torch.float32
    assert torch.equal(decoder.embedding, load_decoder(open_model(tmp_path)).embedding.to(dtype))
    assert not decoder.training and decoder.lm_head is decoder.embedding
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not any(tensor.is_meta for tensor in [*decoder.parameters(), *decoder.buffers()])


def test_stacked_experts(tmp_path: Path) -> None:
    """Stacked and separate expert tensors are equal."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = make_model("qwen3_moe", sizes)
    model.save_pretrained(tmp_path)
    separate = load_decoder(open_model(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in stored
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    stacked = load_decoder(open_model(tmp_path))
    for (name, ours), theirs in zip(stacked.named_parameters(), separate.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


NORM = "model.norm.weight"


@pytest.mark.parametrize("value", [None, torch.zeros(31), torch.zeros(32, dtype=torch.int32)])
def test_mismatching_tensor_is_refused(value: Tensor | None, tmp_path: Path) -> None:
    changed = {} if value is None else {NORM: value}
    edit_tensors(save_model(tmp_path), lambda t: {name: t[name] for name in t if name != NORM} | changed)
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}: tensor.*{re.escape(NORM)}"):
        load_decoder(open_model(tmp_path))


def test_huge_config_allocates_nothing(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_config(tmp_path, lambda c: c.update(vocab_size=1 << 24, hidden_size=1 << 20, head_dim=8))
    with pytest.raises(ValueError, match="has shape"):
        load_decoder(open_model(tmp_path))


def write(folder: Path, name: str, content: str | bytes | None) -> None:
    """Writes a file; None removes it."""
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def redirect_norm(folder: Path, file: object) -> None:
    """Points the index to another file for one tensor."""
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][NORM] = content["weight_map"]["model.embed_tokens.weight"] if file is None else file
    write(folder, INDEX, json.dumps(content))


def cut_shard(folder: Path, kept: int | None) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    write(folder, shard.name, None if kept is None else shard.read_bytes()[:kept])


INDICES = ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000]
CONFIGS = [b"", b"[]", b"{", "\ud800".encode("utf-8", "surrogatepass"), None]
OUTSIDE = ["../model.safetensors", "/tmp/a.safetensors", "a\\b.safetensors", "x.bin", "", 7]
DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    *((partial(write, name=INDEX, content=content), r"index\.json") for content in INDICES),
    *((partial(write, name="config.json", content=content), r"config\.json") for content in CONFIGS),
    *((partial(redirect_norm, file=name), re.escape(repr(str(name)))) for name in OUTSIDE),
    *((partial(cut_shard, kept=kept), "00002-of-") for kept in (None, 0, 7, 200, -5)),
    (partial(redirect_norm, file=None), re.escape(NORM)),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(save_model(tmp_path, shards=True))
    with pytest.raises(ValueError, match=message):
        load_decoder(open_model(tmp_path))


class Bomb:
    """A pickle whose code leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    (save_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "sprung")))
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="pickle"):
            load_decoder(open_model(source))
    assert not (tmp_path / "sprung").exists()


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_config(tmp_path, lambda c: c.update(auto_map={"AutoModelForCausalLM": "trap.Model"}))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    load_decoder(open_model(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_target_of_a_folder(tmp_path: Path) -> None:
    size = BACKEND.get_vocab_size()
    save_model(tmp_path, vocab_size=size, eos_token_id=7)
    write_folder(tmp_path, {"eos_token": "</s>", "bos_token": "<s>"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, size + 5, "x"]}))
    target = load_target(tmp_path)
    assert target.eos_tokens == {1, 7, 8, 9}
    assert (target.path, target.name) == (tmp_path, tmp_path.name)
    logits, _ = run_decoder(target.decoder, target.tokenizer.encode("low lower"))
    assert logits.isfinite().all()


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    write_folder(save_model(tmp_path), {})
    with pytest.raises(ValueError, match=r"tokenizer has .* 61"):
        load_target(tmp_path)


def test_describe(tmp_path: Path) -> None:
    size = BACKEND.get_vocab_size()
    write_folder(save_model(tmp_path, vocab_size=size), {"eos_token": "</s>", "chat_template": "x"})
    told = describe(tmp_path)
    assert (told["kind"], told["format"], told["family"]) == ("target", "safetensors", "llama")
    assert told["parameters"] == sum(parameter.numel() for parameter in load_decoder(open_model(tmp_path)).parameters())
    assert (told["layers"], told["vocab_size"], told["chat_template"]) == (3, size, True)
    assert len(fits(told, told)) == 1
    json.dumps(told)
