"""Weights in: a folder of safetensors or a GGUF file becomes a `Decoder`, and with its tokenizer a `Target`.

Nothing that comes with a model is executed: no pickle, no code from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.families import (
    FAMILIES,
    Layout,
    config_from_gguf,
    config_from_hf,
    dtype_from_hf,
    parts_of,
    stacked_experts_name,
)
from jetspec.models.gguf import GGUFFile
from jetspec.models.hub import resolve
from jetspec.models.tokenizer import Tokenizer

DType = torch.dtype | Literal["auto"]
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
STORED = ("F32", "F16", "BF16")


class Names(Protocol):
    """Which tensors there are, and in whose words."""

    @property
    def layout(self) -> Layout: ...
    def __contains__(self, name: str) -> bool: ...


class TensorSource(Names, Protocol):
    """Named tensors on disk, read one at a time."""

    @property
    def path(self) -> Path: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, out: Tensor) -> None: ...


class _Nothing:
    """A folder that is yet to be written."""

    layout: Layout = "hf"

    def __contains__(self, name: str) -> bool:
        return False


@dataclass(frozen=True)
class Target:
    """A model ready to decode, with what turns text into its tokens and back."""

    decoder: Decoder
    tokenizer: Tokenizer
    eos_tokens: frozenset[int]
    name: str
    path: Path


def load_target(name_or_path: str | Path, dtype: DType = "auto", device: torch.device | str = "cpu") -> Target:
    """Load the default model, a Hugging Face id, a folder of safetensors or a GGUF file."""
    path = resolve(name_or_path)
    model = open_model(path)
    tokenizer, eos_tokens = load_tokenizer(model)
    vocab_size = model.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {vocab_size}")
    known = frozenset(token for token in eos_tokens if 0 <= token < vocab_size)
    return Target(_fill(model, dtype, torch.device(device)), tokenizer, known, Path(name_or_path).name, path)


def load_decoder(source: str | Path, dtype: DType = "auto", device: torch.device | str = "cpu") -> Decoder:
    """Read a model. `auto` is fp32 on the CPU and the model's own dtype, or bf16 where it names none, elsewhere."""
    return _fill(open_model(Path(source)), dtype, torch.device(device))


def load_tokenizer(model: OpenModel) -> tuple[Tokenizer, frozenset[int]]:
    """A model's tokenizer, and every token that ends a text according to any of its files."""
    path = model.tensors.path
    with _naming(path):
        if isinstance(model.tensors, GGUFFile):
            tokenizer = Tokenizer.from_gguf(model.tensors.metadata)
            return tokenizer, tokenizer.eos_tokens
        tokenizer = Tokenizer.from_folder(path)
        return tokenizer, tokenizer.eos_tokens | declared_eos(path)


@dataclass(frozen=True)
class OpenModel:
    """A model whose tensors are still on disk."""

    config: DecoderConfig
    tensors: TensorSource
    dtype: torch.dtype
    """What it is meant to run in."""


def open_model(path: Path) -> OpenModel:
    """Read a model's config and find its tensors. `path` is a folder of safetensors or a GGUF file."""
    with _naming(path):
        if path.is_dir():
            raw = read_json(path / "config.json")
            return OpenModel(config_from_hf(raw), SafetensorsFolder(path), dtype_from_hf(raw))
        if path.suffix in PICKLES:
            raise ValueError("pickle files can run code and are never opened; use safetensors or GGUF")
        file = GGUFFile(path)
        return OpenModel(config_from_gguf(file), file, torch.bfloat16)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors inside say which model they are about."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _fill(model: OpenModel, dtype: DType, device: torch.device) -> Decoder:
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else model.dtype
    with torch.device("meta"):
        decoder = Decoder(model.config)
    parameters = list(decoder.named_parameters())
    for name, parameter in parameters:  # all shapes are known to be right before memory is taken for any
        for piece in _pieces(model.config, name, parameter, model.tensors):
            _check(model.tensors, piece)
    for name, parameter in parameters:
        out = torch.empty(parameter.shape, dtype=dtype, device=device)
        for piece in _pieces(model.config, name, out, model.tensors):
            _read(model.tensors, piece)
        module, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(module), leaf, nn.Parameter(out, requires_grad=False))
    if model.config.tied_embedding:
        decoder.lm_head = decoder.embedding
    return decoder.to(device).eval()


class SafetensorsFolder:
    """The safetensors of a folder: one file, or shards with an index."""

    layout: Layout = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._file_of = self._from_index() if (path / INDEX).exists() else self._from_single()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, out: Tensor) -> None:
        kind = self._slice(name).get_dtype()
        if kind not in STORED:
            raise ValueError(f"{self.path}: tensor {name} is stored as {kind}; {', '.join(STORED)} can be read")
        out.copy_(self._open(self._file_of[name]).get_tensor(name))

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path / file}: tensor {name} is missing, though the index names it") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.path / file, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file}: cannot be read; the download may be incomplete") from error
        return self._files[file]

    def _from_single(self) -> dict[str, str]:
        if not (self.path / "model.safetensors").exists():
            pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in PICKLES)
            if pickles:
                raise ValueError(f"holds only pickle weights ({pickles[0]}), which can run code and are never opened")
            raise ValueError("holds no model.safetensors")
        return dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def _from_index(self) -> dict[str, str]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{INDEX} has no weight_map")
        for file in sorted(set(map(str, weight_map.values()))):
            if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} names {file!r}, which is not a safetensors file of this folder")
            if not (self.path / file).exists():
                raise ValueError(f"shard {file} is missing")
        return {str(name): str(file) for name, file in weight_map.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that came with a model."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a table")
    return value


def declared_eos(folder: Path) -> frozenset[int]:
    """End tokens that a folder names outside its tokenizer."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        declared: Mapping[str, Any] = read_json(folder / file) if (folder / file).exists() else {}
        value = declared.get("eos_token_id")
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    return frozenset(found)


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters under the names of a Hugging Face folder, cut as it stores them."""
    for name, parameter in decoder.named_parameters():
        yield from ((piece.name, piece.out) for piece in _pieces(decoder.config, name, parameter, _Nothing()))


@dataclass(frozen=True)
class _Piece:
    """A stored tensor and the part of one of our parameters that it fills."""

    name: str
    out: Tensor
    permuted_heads: int = 0
    """Heads whose rows llama.cpp interleaved. 0: rows are in order."""


def _pieces(config: DecoderConfig, name: str, out: Tensor, tensors: Names) -> Iterator[_Piece]:
    is_expert = out.dim() == 3
    if is_expert and tensors.layout == "hf" and stacked_experts_name(name) in tensors:
        yield _Piece(stacked_experts_name(name), out)
        return
    parts = list(parts_of(name, is_expert))
    rows = out.shape[1 if is_expert else 0] // len(parts)
    sizes = [rows] * len(parts)
    if ".qkv." in name:
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    is_permuted = tensors.layout == "gguf" and FAMILIES[config.family].architecture == "llama"
    for part, piece in zip(parts, out.split(sizes, 1 if is_expert else 0), strict=True):
        if tensors.layout == "gguf":
            heads = len(piece) // config.head_dim if part.is_rotated and is_permuted else 0
            yield _Piece(part.gguf, piece, heads)
        elif is_expert:
            yield from (_Piece(part.hf.format(e=e), expert) for e, expert in enumerate(piece))
        else:
            yield _Piece(part.hf, piece)


def _check(tensors: TensorSource, piece: _Piece) -> None:
    if piece.name not in tensors:
        raise ValueError(f"{tensors.path}: tensor {piece.name} is missing")
    shape, wanted = tensors.shape(piece.name), tuple(piece.out.shape)
    if shape != wanted:
        raise ValueError(f"{tensors.path}: tensor {piece.name} has shape {shape}; its config asks for {wanted}")


def _read(tensors: TensorSource, piece: _Piece) -> None:
    tensors.read(piece.name, piece.out)
    if piece.permuted_heads:
        # llama.cpp turns neighbouring rows of a head together, we turn row i with row i + half.
        interleaved = piece.out.unflatten(0, (piece.permuted_heads, -1, 2))
        piece.out.copy_(interleaved.transpose(1, 2).flatten(0, 2).clone())
