"""Folders of draft heads: config.json, safetensors and optionally a model card.

A family of layouts is a `HeadFormat` in a module of its own, listed in heads.py. A tensor that the config does not
imply is refused, except those that a format declares as ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jetspec.files import some, whole_folder
from jetspec.models.decoder import DecoderConfig, DecoderStack, RopeConfig, filled, on_meta
from jetspec.models.draft_head import HeadConfig
from jetspec.models.eagle3 import Eagle3Config
from jetspec.models.families import pieces
from jetspec.models.gguf import PLAIN, GGUFFile
from jetspec.models.hub import head_path, resolve
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
from jetspec.models.weights import DType, check_stored, read_weights

CARD_FILE = "README.md"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
SCALE = "_scale"
"""Suffix of the tensor that holds the factor per row of an int8 matrix."""
ROPE_KEYS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
T = TypeVar("T")
H = TypeVar("H", bound=DecoderStack)
C = TypeVar("C", HeadConfig, Eagle3Config)


def kind_of(path: Path) -> str | None:
    """Returns the kind of the head in a folder or GGUF file, by its characteristic keys; None: it is no head."""
    if path.suffix == ".gguf":
        is_head = GGUFFile(path).metadata.get("general.architecture") == "dflash"
        return "GGUF (dflash)" if is_head else None
    raw = raw_config(path)
    names, own = architectures(raw), table(raw, "dflash_config")
    is_unnamed = names <= {"LlamaForCausalLM"} and "dflash_config" not in raw
    kinds = {
        f"speculators ({raw.get('speculators_model_type')})": "speculators_model_type" in raw,
        "DSpark": {"Qwen3DSparkModel", "DSparkDraftModel"} & names or "markov_rank" in {*raw, *own},
        "DFlash2": "DFlash2DraftModel" in names or "selector_rank" in own,
        "Domino": own.get("projector_type") == "domino",
        "EAGLE-3": any("Eagle3" in name for name in names) or (is_unnamed and "draft_vocab_size" in raw),
        "reduced vocabulary": "draft_vocab_size" in raw,
        "DFlash": {"DFlashDraftModel", "Qwen3DFlashDraftModel"} & names or "dflash_config" in raw,
    }
    return next((kind for kind, found in kinds.items() if found), None)


@dataclass(frozen=True)
class Names:
    """Tensor names of a layout."""

    own: Mapping[str, str]
    """Published names of the parameters that a decoder does not have."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other published names, with the names that are written."""
    ignored: frozenset[str] = frozenset()
    """Other tensors, which are not parameters of the head."""
    layer: str = "layers.0."
    """Prefix of the first layer's tensors."""

    def published(self, stored: str) -> str:
        name = stored.removeprefix("model.")
        name = self.aliases.get(name, name)
        return self.layer + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def pieces(self, c: DecoderConfig, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the stored tensors of a parameter, each with its part of `value`."""
        if name in self.own:
            return [(self.own[name], value)]
        return [(self.published(stored), part) for stored, part in pieces(c, name, value, "hf")]


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
                name = names.published(stored)
                if name in self.entries:
                    raise ValueError(f"tensor {name} is stored twice")
                self.entries[name] = file, stored

    def weights(self, head: DecoderStack, dtype: DType, device: torch.device | str) -> dict[str, Tensor]:
        """Reads all parameters of a head. `auto` is the dtype of the file, float32 for int8.

        Names, shapes and dtypes must be exactly those that the config implies.
        """
        find = partial(self.pieces, head.config)
        expected = check_stored(head, self, find)
        scales = {name + SCALE for name in expected if self.dtype(name) == torch.int8}
        if unknown := [name for name in self.entries if name not in expected | scales | self.names.ignored]:
            raise ValueError(f"tensors are not part of the config: {some(unknown)}")
        dtype = self.dtype("fc.weight") if dtype == "auto" else dtype
        return read_weights(head, self, find, torch.float32 if dtype == torch.int8 else dtype, device)

    def pieces(self, c: DecoderConfig, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the stored tensors of a parameter. Some writers stack them as we do."""
        parts = self.names.pieces(c, name, value)
        stacked = parts[0][0].replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
        return [(stacked, value)] if len(parts) > 1 and stacked in self else parts

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        if self.dtype(name) == torch.int8 and (
            name + SCALE not in self or super().shape(name + SCALE) != (shape[0], 1)
        ):
            raise ValueError(f"tensor {name + SCALE} does not hold a factor per row")
        return shape

    def read(self, name: str, out: Tensor) -> None:
        value = self.tensor(name)
        out.copy_(value.float() * self.tensor(name + SCALE).float() if value.dtype == torch.int8 else value)

    def exactly(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor of any dtype that must have this shape."""
        value = self.tensor(name)
        if value.shape != shape:
            raise ValueError(f"tensor {name} has shape {tuple(value.shape)}; the config implies {shape}")
        return value


class TargetShape(Protocol):
    """Properties of a target that a head must fit."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


class HeadFormat(ABC, Generic[C, H]):
    """Reads, writes and describes heads of one class in all their layouts."""

    kinds: tuple[str, ...]
    """Kinds that it reads, as `kind_of` names them."""
    make: Callable[[C], H]
    names: Names

    @abstractmethod
    def parse(self, raw: Mapping[str, Any]) -> C:
        """Reads the contents of config.json and checks every value."""

    @abstractmethod
    def write_config(self, config: C, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the contents of config.json in the published layout."""

    @abstractmethod
    def facts(self, config: C, kind: str) -> dict[str, Any]:
        """Returns the facts that heads of other formats do not have, and the name of the `format`."""

    def for_target(self, config: C, target: DecoderConfig) -> C:
        """Adds what the head's files leave to the target."""
        return config

    def buffers(self, config: C, tensors: HeadTensors, dtype: torch.dtype) -> dict[str, Tensor]:
        """Reads the tensors that are not parameters."""
        return {}

    def buffer_tensors(self, head: H, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the tensors that are not parameters as they are written."""
        return {}

    def read_config(self, folder: Path) -> C:
        """Reads the config of a head's folder and checks every value."""
        kind = kind_of(folder)
        if kind is None:
            why = nested_head(folder) or f"it needs a {CONFIG_FILE} that names DFlashDraftModel"
            raise ValueError(f"{folder} is not a draft head: {why}")
        if kind not in self.kinds:
            raise ValueError(refusal(folder, kind))
        with errors_name(folder / CONFIG_FILE):
            return self.parse(raw_config(folder))

    def load(
        self,
        path_or_id: str | Path,
        target: DecoderConfig | None = None,
        dtype: DType = "auto",
        device: torch.device | str = "cpu",
    ) -> H:
        """Loads a head by its name, folder or Hugging Face id, for inference.

        `auto` is the dtype of the file, float32 for int8. A head that does not fit a given target is refused.
        """
        folder = resolve(head_path(path_or_id))
        config = self.read_config(folder)
        if target is not None:
            config = self.for_target(config, target)
            self.require_fit(path_or_id, config, target)
        if not config.tap_layers:
            raise ValueError(f"{folder} does not name its tap layers; load it together with its target")
        head = on_meta(self.make, config)
        with errors_name(folder):
            tensors = HeadTensors(folder, self.names)
            state = tensors.weights(head, dtype, device)
            state |= self.buffers(config, tensors, state["fc.weight"].dtype)
        return filled(head, state, device)

    def save(self, head: H, folder: str | Path, dtype: torch.dtype = torch.bfloat16, card: str | None = None) -> None:
        """Writes a head in the published layout, with a model card if given; see `write_folder`.

        `dtype` int8 stores 8-bit rows with a factor each: half the size, readable by JetSpec only.
        """
        config: Any = head.head_config
        tensors = published_tensors(head, self.names, dtype) | self.buffer_tensors(head, dtype)
        write_folder(folder, self.write_config(config, dtype), tensors, card)

    def describe(self, folder: Path) -> dict[str, Any]:
        """Returns facts about the head in a folder."""
        config = self.read_config(folder)
        shared = {
            "format": "",
            "parameters": sum(parameter.numel() for parameter in on_meta(self.make, config).parameters()),
            "layers": config.layers.num_layers,
            "hidden_size": config.layers.hidden_size,
            "vocab_size": config.layers.vocab_size,
            "depth": config.depth,
            "tap_layers": list(config.tap_layers),
            "num_target_layers": config.num_target_layers,
            "target_hidden_size": config.target_hidden_size or config.layers.hidden_size,
        }
        return shared | self.facts(config, str(kind_of(folder)))

    def require_fit(self, name: str | Path, head: C, target: TargetShape) -> None:
        """Raise ValueError for a head that does not fit a target."""
        if problems := self.misfits(head, target):
            raise ValueError(f"{name} is a head for another model: {'; '.join(problems)}")

    def misfits(self, head: C, target: TargetShape) -> list[str]:
        """Returns the reasons why a head does not fit a target."""
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


def refusal(path: Path, kind: str) -> str:
    return f"{path} is a head of kind {kind}, which is not supported here; use a JetSpec or DFlash head"


def published_tensors(head: DecoderStack, names: Names, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the parameters of a head as they are written. int8: 8-bit rows with a factor each."""
    out: dict[str, Tensor] = {}
    for parameter, value in head.named_parameters():
        for name, part in names.pieces(head.config, parameter, value.detach()):
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


def architectures(raw: Mapping[str, Any]) -> set[str]:
    names = raw.get("architectures")
    return set(map(str, names)) if isinstance(names, list) else set()


def table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is not a table")
    return value


def agreed(values: Mapping[str, T]) -> T | None:
    """Returns the value that several spellings of a key have; None if none is present."""
    if len(set(values.values())) > 1:
        raise ValueError("contradictory: " + ", ".join(f"{key} means {value}" for key, value in values.items()))
    return next(iter(values.values()), None)


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
    return scaling | {name: getattr(rope, name) for name in ROPE_KEYS.get(rope.kind, ())}
