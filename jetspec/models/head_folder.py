"""A head's folder: config.json, safetensors and perhaps a card. What all layouts of heads share.

Nothing in a folder is ever executed. Shapes and dtypes are checked before anything is read.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetspec.files import some, whole_folder
from jetspec.models.decoder import DecoderConfig, DecoderStack, RopeConfig
from jetspec.models.families import parts_of
from jetspec.models.weights import DType, read_json

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}
SCALE = "_scale"
"""A matrix stored as int8 has a second tensor of this ending: a factor per row."""


@dataclass(frozen=True)
class Names:
    """How a layout names its tensors."""

    own: Mapping[str, str]
    """Our names -> the published ones, for what a head has and a decoder has not."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other published names -> those that we write."""
    aside: frozenset[str] = frozenset()
    """Tensors that are no weights of the head: whoever knows the layout looks at them, or nobody."""
    layer: str = "layers.0."
    """What the names of the first layer begin with."""

    def published(self, stored: str) -> str:
        name = stored.removeprefix("model.")
        name = self.aliases.get(name, name)
        return self.layer + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def parts(self, name: str, c: DecoderConfig) -> Iterator[tuple[str, int]]:
        """Names of the tensors behind one of our parameters, and the rows of each. 0: all."""
        if name in self.own:
            yield self.own[name], 0
            return
        names = [self.published(part.hf) for part in parts_of(name, is_expert=False)]
        key_rows = c.num_kv_heads * c.head_dim
        rows = {1: [0], 2: [c.inner_size] * 2, 3: [c.num_heads * c.head_dim, key_rows, key_rows]}[len(names)]
        yield from zip(names, rows, strict=True)


@dataclass(frozen=True)
class Piece:
    """A stored tensor and the part of one of our parameters that it fills."""

    name: str
    out: Tensor


class HeadTensors:
    """The tensors of a head's folder under their published names."""

    def __init__(self, folder: Path, names: Names) -> None:
        self.names = names
        self.files: dict[str, tuple[Any, str]] = {}
        self.aside: dict[str, tuple[Any, str]] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{WEIGHTS_FILE} is missing; weights in other files, such as pickles, are never opened")
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} cannot be read, it may be incomplete ({error})") from None
        for stored in file.keys():  # noqa: SIM118  the handle is no mapping
            name = self.names.published(stored)
            if name in self.files or name in self.aside:
                raise ValueError(f"tensor {name} is stored twice")
            (self.aside if name in self.names.aside else self.files)[name] = file, stored

    def dtype(self, name: str) -> torch.dtype:
        file, stored = self.files[name]
        kind = file.get_slice(stored).get_dtype()
        if kind not in STORED:
            raise ValueError(f"tensor {name} is stored as {kind}; {', '.join(STORED)} can be read")
        return STORED[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self.files[name]
        return tuple(file.get_slice(stored).get_shape())

    def check(self, head: DecoderStack) -> None:
        """Names, shapes and dtypes are those that the config asks for, no more and no fewer."""
        pieces = [p for name, value in head.named_parameters() for p in self.pieces(name, head.config, value)]
        wanted = {piece.name: tuple(piece.out.shape) for piece in pieces}
        if missing := [name for name in wanted if name not in self.files]:
            raise ValueError(f"tensors are missing: {some(missing)}")
        scales = {name + SCALE for name in wanted if self.dtype(name) == torch.int8}
        if missing := [name for name in scales if name not in self.files]:
            raise ValueError(f"tensors are missing: {some(missing)}")
        if unknown := [name for name in self.files if name not in wanted and name not in scales]:
            raise ValueError(f"tensors are not part of the config: {some(unknown)}")
        for name, shape in {**wanted, **{name: (wanted[name.removesuffix(SCALE)][0], 1) for name in scales}}.items():
            self.dtype(name)
            if self.shape(name) != shape:
                raise ValueError(f"tensor {name} has shape {self.shape(name)}; the config asks for {shape}")

    def weights(self, head: DecoderStack, dtype: DType, device: torch.device | str) -> dict[str, Tensor]:
        """All parameters of a head. `auto` is the dtype of the file, float32 for int8."""
        stored_dtype = self.dtype("fc.weight") if dtype == "auto" else dtype
        if stored_dtype == torch.int8:
            stored_dtype = torch.float32
        state = {}
        for name, parameter in head.named_parameters():
            state[name] = torch.empty(parameter.shape, dtype=stored_dtype, device=device)
            self._read(name, head.config, state[name])
        return state

    def _read(self, name: str, c: DecoderConfig, out: Tensor) -> None:
        """Fill one of our parameters."""
        for piece in self.pieces(name, c, out):
            value = self.tensor(piece.name)
            if value.dtype == torch.int8:
                value = value.float() * self.tensor(piece.name + SCALE).float()
            piece.out.copy_(value)

    def tensor(self, name: str) -> Tensor:
        file, stored = self.files.get(name) or self.aside[name]
        return file.get_tensor(stored)

    def pieces(self, name: str, c: DecoderConfig, out: Tensor) -> Iterator[Piece]:
        """Where the stored tensors go: rows of ours, which some writers stack as we do."""
        parts = dict(self.names.parts(name, c))
        first = next(iter(parts))
        stacked = first.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
        if len(parts) == 1 or stacked in self.files:
            yield Piece(first if len(parts) == 1 else stacked, out)
        else:
            yield from map(Piece, parts, out.split(list(parts.values())))


def published_tensors(head: DecoderStack, names: Names, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a head, to be written. int8: rows as 8-bit numbers with a factor."""
    out: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        stored = dict(names.parts(name, head.config))
        parts = parameter.detach().split([rows or len(parameter) for rows in stored.values()])
        for key, part in zip(stored, parts, strict=True):
            if dtype == torch.int8:
                out |= _as_int8(key, part.to("cpu", torch.float32))
            else:
                out[key] = part.to("cpu", dtype, copy=True)
    return out


def _as_int8(name: str, value: Tensor) -> dict[str, Tensor]:
    """Rows as multiples of a 127th of their largest entry; norms stay as they are."""
    if value.dim() == 1:
        return {name: value.clone()}
    scale = (value.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return {name: (value / scale).round().to(torch.int8), name + SCALE: scale}


def write_folder(folder: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], card: str | None) -> None:
    """Make a head's folder, which appears complete or not at all.

    It replaces an older head; a folder that holds anything else is not touched.
    """
    with whole_folder(Path(folder), OWN_FILES) as fresh:
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (fresh / CARD_FILE).write_text(card, encoding="utf-8")
        write_tensors(tensors, fresh / WEIGHTS_FILE)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that whoever may read its neighbours may read. What the system refuses is an OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
    path.chmod(mode)  # the library's own choice is the owner alone


def raw_config(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where there is none."""
    try:
        return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def nested_head(folder: Path) -> str | None:
    """A hint for whoever names the folder of a run, which holds its head in a folder of that name."""
    inner = folder / "head"
    return f"did you mean {inner}?" if (inner / CONFIG_FILE).is_file() else None


def table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is not a table")
    return value


def architectures(raw: Mapping[str, Any]) -> set[str]:
    names = raw.get("architectures")
    return set(map(str, names)) if isinstance(names, list) else set()


class Target(Protocol):
    """What a head must know of its target."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


def misfits(vocab_size: int, num_target_layers: int | None, tap_layers: Sequence[int], target: Target) -> list[str]:
    """What keeps a head of any kind from a target, in plain words."""
    problems = []
    if vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {vocab_size} tokens, the target's has {target.vocab_size}")
    if num_target_layers not in (None, target.num_layers):
        problems.append(f"it was made for {num_target_layers} layers, the target has {target.num_layers}")
    if outside := [i for i in tap_layers if not 0 <= i < target.num_layers]:
        problems.append(f"it taps layer {outside[0]}, the target has layers 0 to {target.num_layers - 1}")
    return problems


def layer_fields(c: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says about the layers, in any layout."""
    return {
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.inner_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "attention_bias": c.qkv_bias,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_len,
        "rope_theta": c.rope.theta,
        "rope_scaling": _rope_scaling(c.rope),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.divisors:
        raise ValueError("rotary frequencies with a factor each cannot be written; they need a plain rope")
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_len:
        scaling["original_max_position_embeddings"] = rope.original_len
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    return scaling
