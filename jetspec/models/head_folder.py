"""Folders of draft heads: config.json, safetensors and optionally a model card. Shared by all layouts of heads.

Shapes and dtypes are checked before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from jetspec.files import some, whole_folder
from jetspec.models.decoder import DecoderConfig, DecoderStack, RopeConfig
from jetspec.models.draft_head import HeadConfig
from jetspec.models.eagle3 import Eagle3Config
from jetspec.models.families import part_rows, parts_of
from jetspec.models.gguf import PLAIN
from jetspec.models.tensor_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TensorFiles,
    errors_name,
    open_safetensors,
    read_json,
    write_json,
    write_tensors,
)
from jetspec.models.weights import DType

CARD_FILE = "README.md"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
SCALE = "_scale"
"""Suffix of the tensor that holds the factor per row of an int8 matrix."""
T = TypeVar("T")
H = TypeVar("H", bound=DecoderStack)
C = TypeVar("C", HeadConfig, Eagle3Config)


@dataclass(frozen=True)
class Names:
    """Tensor names of a layout."""

    own: Mapping[str, str]
    """Published names of the parameters that a decoder does not have."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other published names, with the names that are written."""
    others: frozenset[str] = frozenset()
    """Other tensors, which are not parameters of the head."""
    layer: str = "layers.0."
    """Prefix of the first layer's tensors."""

    def published(self, stored: str) -> str:
        name = stored.removeprefix("model.")
        name = self.aliases.get(name, name)
        return self.layer + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def parts(self, name: str, c: DecoderConfig, rows: int) -> dict[str, int]:
        """Names and rows of the stored tensors behind a parameter of so many rows."""
        if name in self.own:
            return {self.own[name]: rows}
        names = [self.published(part.hf) for part in parts_of(name, is_expert=False)]
        return dict(zip(names, part_rows(c, len(names), rows), strict=True))


class HeadTensors(TensorFiles):
    """Tensors of a head's folder under their published names."""

    dtypes: Mapping[str, torch.dtype] = {**PLAIN, "I8": torch.int8}

    def __init__(self, folder: Path, names: Names) -> None:
        super().__init__()
        self.names = names
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{WEIGHTS_FILE} is missing; weights in other files, such as pickles, are never opened")
        for path in paths:
            file = open_safetensors(path)
            for stored in file.keys():  # noqa: SIM118  the handle is no mapping
                name = self.names.published(stored)
                if name in self.entries:
                    raise ValueError(f"tensor {name} is stored twice")
                self.entries[name] = file, stored

    def check(self, head: DecoderStack) -> None:
        """Raise ValueError unless names, shapes and dtypes are exactly those that the config implies."""
        expected = {
            name: tuple(part.shape)
            for parameter, value in head.named_parameters()
            for name, part in self.pieces(parameter, head.config, value)
        }
        for name, shape in list(expected.items()):
            if name in self and self.dtype(name) == torch.int8:
                expected[name + SCALE] = (shape[0], 1)
        if missing := [name for name in expected if name not in self]:
            raise ValueError(f"tensors are missing: {some(missing)}")
        if unknown := [name for name in self.entries if name not in expected and name not in self.names.others]:
            raise ValueError(f"tensors are not part of the config: {some(unknown)}")
        for name, shape in expected.items():
            self.dtype(name)
            if self.shape(name) != shape:
                raise ValueError(f"tensor {name} has shape {self.shape(name)}; the config implies {shape}")

    def weights(self, head: DecoderStack, dtype: DType, device: torch.device | str) -> dict[str, Tensor]:
        """Reads all parameters of a head. `auto` is the dtype of the file, float32 for int8."""
        dtype = self.dtype("fc.weight") if dtype == "auto" else dtype
        if dtype == torch.int8:
            dtype = torch.float32
        state = {}
        for parameter, like in head.named_parameters():
            state[parameter] = torch.empty(like.shape, dtype=dtype, device=device)
            for name, part in self.pieces(parameter, head.config, state[parameter]):
                value = self.tensor(name)
                part.copy_(value.float() * self.tensor(name + SCALE).float() if value.dtype == torch.int8 else value)
        return state

    def pieces(self, name: str, c: DecoderConfig, out: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields stored tensors and the rows of a parameter that each fills. Some writers stack them as we do."""
        parts = self.names.parts(name, c, len(out))
        first = next(iter(parts))
        stacked = first.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
        if len(parts) == 1 or stacked in self:
            yield first if len(parts) == 1 else stacked, out
        else:
            yield from zip(parts, out.split(list(parts.values())), strict=True)


def load_weights(
    kind: Callable[[C], H],
    config: C,
    folder: Path,
    names: Names,
    dtype: DType,
    device: torch.device | str,
    buffers: Callable[[HeadTensors, torch.dtype], dict[str, Tensor]] | None = None,
) -> H:
    """Loads a head of a kind from its folder, for inference. `buffers` reads the tensors that are not parameters."""
    with torch.device("meta"):
        head = kind(config)
    with errors_name(folder):
        tensors = HeadTensors(folder, names)
        tensors.check(head)
        state = tensors.weights(head, dtype, device)
        if buffers is not None:
            state |= buffers(tensors, state["fc.weight"].dtype)
    head.load_state_dict(state, assign=True)
    return head.to(device).requires_grad_(False).eval()


def published_tensors(head: DecoderStack, names: Names, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the parameters of a head as they are written. int8: 8-bit rows with a factor each."""
    out: dict[str, Tensor] = {}
    for parameter, value in head.named_parameters():
        stored = names.parts(parameter, head.config, len(value))
        for name, part in zip(stored, value.detach().split(list(stored.values())), strict=True):
            out[name] = part.to("cpu", torch.float32 if dtype == torch.int8 else dtype, copy=True)
            if dtype == torch.int8 and part.dim() > 1:
                # Multiples of a 127th of a row's largest entry; norms stay as they are.
                scale = (out[name].abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
                out |= {name: (out[name] / scale).round().to(torch.int8), name + SCALE: scale}
    return out


def write_folder(folder: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], card: str | None) -> None:
    """Writes a head's folder, which appears complete or not at all.

    It replaces an older head; a folder with other files in it is refused.
    """
    with whole_folder(Path(folder), OWN_FILES) as fresh:
        write_json(fresh / CONFIG_FILE, config)
        if card is not None:
            (fresh / CARD_FILE).write_text(card, encoding="utf-8")
        write_tensors(tensors, fresh / WEIGHTS_FILE)


def raw_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of config.json; empty if there is none."""
    with errors_name(folder):
        return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def nested_head(folder: Path) -> str | None:
    """Returns a hint if this is the folder of a training run, whose head is in a subfolder."""
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


def agreed(values: Mapping[str, T]) -> T | None:
    """Returns the value that several spellings of a key have; None if none is present."""
    if len(set(values.values())) > 1:
        raise ValueError("contradictory: " + ", ".join(f"{key} means {value}" for key, value in values.items()))
    return next(iter(values.values()), None)


class TargetShape(Protocol):
    """Properties of a target that a head must fit."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


def misfits(head: HeadConfig | Eagle3Config, target: TargetShape) -> list[str]:
    """Returns the reasons why a head of any kind does not fit a target."""
    problems = []
    vocab_size, read_size = head.layers.vocab_size, head.target_hidden_size or head.layers.hidden_size
    if read_size != target.hidden_size:
        problems.append(f"it reads states of size {read_size}, the target's have {target.hidden_size}")
    if vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {vocab_size} tokens, the target's has {target.vocab_size}")
    if head.num_target_layers not in (None, target.num_layers):
        problems.append(f"it was made for {head.num_target_layers} layers, the target has {target.num_layers}")
    if outside := [i for i in head.tap_layers if not 0 <= i < target.num_layers]:
        problems.append(f"it taps layer {outside[0]}, the target has layers 0 to {target.num_layers - 1}")
    return problems


def shared_facts(kind: Callable[[C], DecoderStack], config: C) -> dict[str, Any]:
    """Returns the facts about a head that all kinds have."""
    with torch.device("meta"):
        head = kind(config)
    return {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "layers": config.layers.num_layers,
        "hidden_size": config.layers.hidden_size,
        "vocab_size": config.layers.vocab_size,
        "depth": config.depth,
        "tap_layers": list(config.tap_layers),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size or config.layers.hidden_size,
    }


def layer_fields(c: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the keys of config.json that describe decoder layers, in any layout."""
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
        raise ValueError("a config.json cannot hold a factor for each rotary frequency")
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
