"""Loads a target: a folder of safetensors or a GGUF file becomes a `Decoder`, with its tokenizer a `Target`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.families import (
    FAMILIES,
    config_from_gguf,
    config_from_hf,
    dtype_from_hf,
    part_rows,
    parts_of,
    stacked_experts_name,
)
from jetspec.models.gguf import GGUFFile
from jetspec.models.hub import resolve
from jetspec.models.tensor_files import CONFIG_FILE, WEIGHTS_FILE, TensorFiles, errors_name, open_safetensors, read_json
from jetspec.models.tokenizer import Tokenizer

DType = torch.dtype | Literal["auto"]
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
        return tokenizer, tokenizer.eos_tokens | declared_eos(path)


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
            return OpenModel(config_from_hf(raw), SafetensorsFolder(path), dtype_from_hf(raw))
        if path.suffix in PICKLES:
            raise ValueError("pickle files can run code and are never opened; use safetensors or GGUF")
        file = GGUFFile(path)
        return OpenModel(config_from_gguf(file), file, torch.bfloat16)


def load_decoder(model: OpenModel, dtype: DType = "auto", device: torch.device | str = "cpu") -> Decoder:
    """Reads the weights. `auto` is fp32 on the CPU, elsewhere the model's own dtype or bf16."""
    if dtype == "auto":
        dtype = torch.float32 if torch.device(device).type == "cpu" else model.dtype
    with torch.device("meta"):
        decoder = Decoder(model.config)
    parameters = list(decoder.named_parameters())
    with errors_name(model.tensors.path):
        for name, parameter in parameters:  # check all shapes before memory is allocated for any
            for piece in _pieces(model.config, name, parameter, model.tensors):
                if piece.name not in model.tensors:
                    raise ValueError(f"tensor {piece.name} is missing")
                if (shape := model.tensors.shape(piece.name)) != piece.out.shape:
                    raise ValueError(f"tensor {piece.name} has shape {shape}; the config implies {(*piece.out.shape,)}")
        for name, parameter in parameters:
            out = torch.empty(parameter.shape, dtype=dtype, device=device)
            for piece in _pieces(model.config, name, out, model.tensors):
                model.tensors.read(piece.name, piece.out)
                if piece.permuted_heads:
                    # llama.cpp rotates neighbouring rows of a head together; we rotate row i with row i + half.
                    interleaved = piece.out.unflatten(0, (piece.permuted_heads, -1, 2))
                    piece.out.copy_(interleaved.transpose(1, 2).flatten(0, 2).clone())
            module, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(module), leaf, nn.Parameter(out, requires_grad=False))
    if model.config.tied_embedding:
        decoder.lm_head = decoder.embedding
    return decoder.to(device).eval()


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

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return super().shape(name)
        except SafetensorError as error:
            raise ValueError(f"tensor {name} is missing, though the index names it") from error

    def read(self, name: str, out: Tensor) -> None:
        self.dtype(name)
        out.copy_(self.tensor(name))

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


def declared_eos(folder: Path) -> frozenset[int]:
    """Returns the end tokens that a folder declares outside its tokenizer."""
    found: set[int] = set()
    for file in ("generation_config.json", CONFIG_FILE):
        value = read_json(folder / file).get("eos_token_id") if (folder / file).exists() else None
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    return frozenset(found)


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's parameters as the tensors of a Hugging Face folder."""
    for name, parameter in decoder.named_parameters():
        yield from ((piece.name, piece.out) for piece in _pieces(decoder.config, name, parameter, TensorFiles()))


@dataclass(frozen=True)
class _Piece:
    """A stored tensor and the part of a parameter that it fills."""

    name: str
    out: Tensor
    permuted_heads: int = 0
    """Heads whose rows llama.cpp interleaved. 0: rows are in order."""


def _pieces(config: DecoderConfig, name: str, out: Tensor, tensors: TensorFiles | GGUFFile) -> Iterator[_Piece]:
    is_expert = out.dim() == 3
    if is_expert and tensors.layout == "hf" and stacked_experts_name(name) in tensors:
        yield _Piece(stacked_experts_name(name), out)
        return
    parts = list(parts_of(name, is_expert))
    is_permuted = tensors.layout == "gguf" and FAMILIES[config.family].architecture == "llama"
    axis = 1 if is_expert else 0
    for part, piece in zip(parts, out.split(part_rows(config, len(parts), out.shape[axis]), axis), strict=True):
        if tensors.layout == "gguf":
            heads = len(piece) // config.head_dim if part.is_rotated and is_permuted else 0
            yield _Piece(part.gguf, piece, heads)
        elif is_expert:
            yield from (_Piece(part.hf.format(e=e), expert) for e, expert in enumerate(piece))
        else:
            yield _Piece(part.hf, piece)
