"""Loads a target: a folder of safetensors or a GGUF file becomes a `Decoder`, with its tokenizer a `Target`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jetspec.files import some
from jetspec.models.decoder import C, Decoder, DecoderConfig, DecoderStack, S, filled, on_meta
from jetspec.models.families import FAMILIES, Layout, config_from_gguf, config_from_hf, dtype_from_hf, pieces
from jetspec.models.gguf import GGUFFile
from jetspec.models.hub import resolve
from jetspec.models.tensor_files import CONFIG_FILE, WEIGHTS_FILE, TensorFiles, errors_name, open_safetensors, read_json
from jetspec.models.tokenizer import Tokenizer

DType = torch.dtype | Literal["auto"]
STD = 0.02
"""Of random weights."""
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Target:
    """A model in memory with its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer
    eos_tokens: frozenset[int]
    name: str
    path: Path


def load_target(name_or_path: str | Path, dtype: DType = "auto", device: torch.device | str = "cpu") -> Target:
    """Loads the default model, a Hugging Face id, a folder of safetensors or a GGUF file."""
    path = resolve(name_or_path)
    model = open_model(path)
    tokenizer, eos_tokens = load_tokenizer(model)
    vocab_size = model.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {vocab_size}")
    known = frozenset(token for token in eos_tokens if 0 <= token < vocab_size)
    return Target(load_decoder(model, dtype, device), tokenizer, known, Path(name_or_path).name, path)


def load_tokenizer(model: OpenModel) -> tuple[Tokenizer, frozenset[int]]:
    """Returns a model's tokenizer and all end tokens that its files declare."""
    path = model.tensors.path
    with errors_name(path):
        if isinstance(model.tensors, GGUFFile):
            tokenizer = Tokenizer.from_gguf(model.tensors.metadata)
            return tokenizer, tokenizer.eos_tokens
        tokenizer = Tokenizer.from_folder(path)
        found = set(tokenizer.eos_tokens)
        for file in (path / "generation_config.json", path / CONFIG_FILE):
            value = read_json(file).get("eos_token_id") if file.exists() else None
            found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
        return tokenizer, frozenset(found)


@dataclass(frozen=True)
class OpenModel:
    """A model with its tensors still on disk."""

    config: DecoderConfig
    tensors: SafetensorsFolder | GGUFFile
    dtype: torch.dtype
    """Dtype that its config names, or bf16."""


def open_model(path: Path) -> OpenModel:
    """Reads the config and the tensor names of a folder of safetensors or a GGUF file."""
    with errors_name(path):
        if path.is_dir():
            raw = read_json(path / CONFIG_FILE)
            config, tensors = config_from_hf(raw), SafetensorsFolder(path)
            if config.tied_embedding and _has_own_lm_head(tensors):
                config = replace(config, tied_embedding=False)
            return OpenModel(config, tensors, dtype_from_hf(raw))
        if path.suffix in PICKLES:
            raise ValueError("pickle files can run code and are never opened; use safetensors or GGUF")
        file = GGUFFile(path)
        return OpenModel(config_from_gguf(file), file, torch.bfloat16)


def _has_own_lm_head(tensors: SafetensorsFolder) -> bool:
    """Returns true if an output matrix is stored that differs from the embedding: transformers then uses it, whatever
    `tie_word_embeddings` says."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    return all(name in tensors for name in names) and not torch.equal(*map(tensors.tensor, names))


def load_decoder(model: OpenModel, dtype: DType = "auto", device: torch.device | str = "cpu") -> Decoder:
    """Reads the weights. `auto` is fp32 on the CPU, elsewhere the model's own dtype or bf16."""
    if dtype == "auto":
        dtype = torch.float32 if torch.device(device).type == "cpu" else model.dtype
    c, decoder = model.config, on_meta(Decoder, model.config)
    layout: Layout = "gguf" if isinstance(model.tensors, GGUFFile) else "hf"
    find = partial(pieces, c, layout=layout, stored=model.tensors)
    with errors_name(model.tensors.path):
        check_stored(decoder, model.tensors, find)
        state = read_weights(decoder, model.tensors, find, dtype, device)
    if layout == "gguf" and FAMILIES[c.family].architecture == "llama":
        # llama.cpp rotates neighbouring rows of a head of q or k together; we rotate row i with row i + half.
        heads = c.num_heads + c.num_kv_heads
        for rows in (value[: heads * c.head_dim] for name, value in state.items() if ".qkv." in name):
            rows.copy_(rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).clone())
    return filled(decoder, state, device)


Pieces = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Maps a parameter's name and value to the stored tensors behind it, each with its part of the value."""


def check_stored(stack: DecoderStack, tensors: TensorFiles | GGUFFile, find: Pieces) -> set[str]:
    """Raise ValueError unless all tensors have the shapes that the config implies. Returns their names.

    Checked before memory is allocated for any.
    """
    expected = {stored: part.shape for name, value in stack.named_parameters() for stored, part in find(name, value)}
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"tensors are missing: {some(missing)}")
    for name, shape in expected.items():
        if (found := tensors.shape(name)) != shape:
            raise ValueError(f"tensor {name} has shape {found}; the config implies {(*shape,)}")
    return set(expected)


def read_weights(
    stack: DecoderStack, tensors: TensorFiles | GGUFFile, find: Pieces, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Reads all parameters of a stack."""
    state = {}
    for name, like in stack.named_parameters():
        state[name] = torch.empty(like.shape, dtype=dtype, device=device)
        for stored, part in find(name, state[name]):
            tensors.read(stored, part)
    return state


class SafetensorsFolder(TensorFiles):
    """Tensors of a target's folder: one safetensors file, or shards with an index."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if (path / INDEX).exists():
            self._add_shards()
        elif (path / WEIGHTS_FILE).exists():
            file = open_safetensors(path / WEIGHTS_FILE)
            self.entries = {name: (file, name) for name in file.keys()}  # noqa: SIM118  the handle is no mapping
        else:
            pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
            if pickles:
                raise ValueError(f"holds only pickle weights ({pickles[0]}), which can run code and are never opened")
            raise ValueError(f"holds no {WEIGHTS_FILE}")

    def _add_shards(self) -> None:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{INDEX} has no weight_map")
        files = {}
        for file in sorted(set(map(str, weight_map.values()))):
            if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} names {file!r}, which is not a safetensors file of this folder")
            if not (self.path / file).exists():
                raise ValueError(f"shard {file} is missing")
            files[file] = open_safetensors(self.path / file)
        self.entries = {str(name): (files[str(file)], str(name)) for name, file in weight_map.items()}


def random_weights(make: Callable[[C], S], config: C, dtype: torch.dtype, device: torch.device) -> S:
    """Makes a model for measurements, which runs at the speed of a trained one.

    The weights are made directly on their device: copying large ones takes long.
    """
    stack, generator, state = on_meta(make, config), torch.Generator(device).manual_seed(0), {}
    for name, parameter in stack.named_parameters():
        state[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() > 1:
            state[name].normal_(0, _std(stack.config, name), generator=generator)
        else:
            state[name].fill_(0 if name.endswith("bias") else 1)
    return filled(stack, state, device)


def _std(config: DecoderConfig, name: str) -> float:
    """Standard deviation that keeps the states of different tokens different, so that they are routed to different
    experts: deeper models add less per layer, as in usual initialisations."""
    if name == "embedding":  # the scale of layer inputs; a tied one also computes logits
        return STD if config.tied_embedding else 1
    is_added = name.endswith(("attention.out.weight", "mlp.down", "mlp.down.weight"))
    return STD / math.sqrt(2 * config.num_layers) if is_added else STD
