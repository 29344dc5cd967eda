"""Folders of draft heads: config.json, safetensors and optionally a model card.

A family of layouts is a `HeadFormat` in a module of its own, listed in heads.py. A tensor that the config does not
imply is refused, except those that a format declares as ignored.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jetspec.files import some, whole_folder
from jetspec.models.choices import CHOICES_FILE, ChoiceFits
from jetspec.models.decoder import DecoderConfig, DecoderStack, filled, on_meta
from jetspec.models.draft_head import EngineHead, HeadConfig, LastTap
from jetspec.models.eagle3 import Eagle3Config
from jetspec.models.families import MAX_LAYERS, Fields, config_from_hf, pieces, rope_from_hf, rope_to_hf
from jetspec.models.gguf import PLAIN
from jetspec.models.head_gguf import DrafterFile, drafter_kind
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
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, CHOICES_FILE)
SCALE = "_scale"
"""Suffix of the tensor that holds the factor per row of an int8 matrix."""
T = TypeVar("T")
H = TypeVar("H", bound=EngineHead)
C = TypeVar("C", HeadConfig, Eagle3Config)


def kind_of(path: Path) -> str | None:
    """Returns the kind of the head in a folder or GGUF file, by its characteristic keys; None: it is no head."""
    if path.suffix == ".gguf" and (kind := drafter_kind(path)) != "dflash":
        return kind and f"GGUF ({kind})"
    raw = raw_config(path)
    with errors_name(config_file(path)):
        return kind_of_config(raw)


def config_file(path: Path) -> Path:
    """Returns the file that holds the config of a head's folder or GGUF file."""
    return path if path.is_file() else path / CONFIG_FILE


def kind_of_config(raw: Mapping[str, Any]) -> str | None:
    """Returns the kind of a head by the contents of its config.json."""
    names, own = architectures(raw), table(raw, "dflash_config")
    keys, projector = {*raw, *own}, own.get("projector_type")
    is_unnamed = names <= {"LlamaForCausalLM"} and not {"dflash_config", "block_size"} & raw.keys()
    kinds = {
        f"speculators ({raw.get('speculators_model_type')})": "speculators_model_type" in raw,
        "EAGLE-3": any("Eagle3" in name for name in names) or (is_unnamed and "draft_vocab_size" in raw),
        "P-EAGLE": "PEagleDraftModel" in names,
        "SpecForge DSpark": "DSparkDraftModel" in names or projector == "dspark",
        "Domino": "DominoDraftModel" in names or projector == "domino",
        "DSpark": "Qwen3DSparkModel" in names,
        "DFly": ("Qwen3DFlyModel" in names or "enable_hidden_correction" in raw) and "dflash_config" not in raw,
        "DFlash2": "DFlash2DraftModel" in names or "selector_rank" in keys,
        "DFlash": {"DFlashDraftModel", "Qwen3DFlashDraftModel"} & names or "dflash_config" in raw,
        "DSpark of another family": any("DSpark" in name for name in names) or "markov_rank" in keys,
    }
    return next((kind for kind, found in kinds.items() if found), None)


HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "architectures",
            "auto_map",
            "_name_or_path",
            "name_or_path",
            "transformers_version",
            "speculators_version",
            "speculators_model_type",
            "has_no_defaults_at_init",
            "target_model_name_or_path",
        ),
        "names of software and of the target",
    ),
    **dict.fromkeys(("dtype", "torch_dtype", "_attn_implementation", "attn_implementation"), "storage and speed"),
    **dict.fromkeys(
        (
            *("attention_dropout", "initializer_range", "num_anchors", "output_router_logits", "embed_requires_grad"),
            *("ttt_steps", "step_loss_decay"),
        ),
        "read in training only",
    ),
    **dict.fromkeys(("use_cache", "speculators_config", "num_jacobi_passes"), "settings of an engine"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"), "not read by any head"),
    **dict.fromkeys(("max_window_layers", "use_sliding_window", "sliding_window"), "layer_types decides"),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), "read by some ropes only"),
    "tie_word_embeddings": "the output matrix is the target's, or stored",
    "model_type": "block heads have Qwen3's layers; others check their tensors",
    **dict.fromkeys(("dflash_config", "eagle_config", "transformer_layer_config"), "its own keys are checked"),
    "is_decoder": "all layers are",
    "gate_temperature": "read by a fusion_type that is refused",
}
"""Keys of config.json that change nothing in a draft where no reader asks for them, with the reason."""
SWITCHES = ("mlp_bias", "enable_confidence_head", "enable_hidden_correction")
"""Keys that change nothing where they are false."""


class HeadKeys(Fields, Mapping[str, Any]):
    """Keys of one or more tables of a config.json, the first table first, with a record of those that were read.

    A key without a value counts as absent. Tables inside are such keys again.
    """

    def __init__(self, *tables: tuple[str, Mapping[str, Any]]) -> None:
        super().__init__(self)
        self.tables = tables
        self.read: set[tuple[str, str]] = set()
        """Tables and keys in them."""
        self.inner: dict[str, HeadKeys] = {}

    def __getitem__(self, key: str) -> Any:
        self.read |= {(where, key) for where, _ in self.tables}
        found = [(f"{where}{key}.", table[key]) for where, table in self.tables if table.get(key) is not None]
        if not found:
            raise KeyError(key)
        where, value = found[0]
        if isinstance(value, HeadKeys) or not isinstance(value, Mapping):
            return value
        return self.inner.setdefault(key, HeadKeys((where, value)))

    def __iter__(self) -> Iterator[str]:
        return iter({key for _, table in self.tables for key, value in table.items() if value is not None})

    def items(self) -> ItemsView[str, Any]:
        """Returns all pairs, which do not count as read."""
        tables = [table.items() for _, table in reversed(self.tables)]
        return {key: value for table in tables for key, value in table if value is not None}.items()

    def __len__(self) -> int:
        return len(list(iter(self)))

    def layers(self, changes: Mapping[str, Any]) -> DecoderConfig:
        """Reads decoder layers with some keys changed. Spellings of a rope must not contradict each other."""
        keys = HeadKeys(("changed.", changes), *self.tables)
        layers = config_from_hf(keys)
        self.read |= keys.read
        self.inner |= keys.inner
        places = {"": keys, **{f"{key}.": table(keys, key) for key in ("rope_parameters", "rope_scaling")}}
        for spellings in (("rope_theta",), ("rope_type", "type")):
            found = {where + key: place.get(key) for where, place in places.items() for key in spellings}
            agreed({key: str(value) for key, value in found.items() if value is not None})
        ropes = {"rope_parameters": layers.rope}
        if places["rope_parameters."] and (old := places["rope_scaling."]):
            changed = {"rope_parameters": old, "rope_theta": layers.rope.theta}
            ropes["rope_scaling"] = rope_from_hf(HeadKeys(("changed.", changed), *self.tables))
        agreed(ropes)
        return layers


def refuse_unread(*sections: HeadKeys) -> None:
    """Raise ValueError for a key that no reader has asked for, unless it is known to change nothing."""
    read = {each for section in sections for each in section.read}
    for section in sections:
        for where, table in section.tables:
            for key, value in table.items():
                is_off = value is None or (value is False and key in SWITCHES)
                if not is_off and (where, key) not in read and key not in HARMLESS:
                    raise ValueError(f"{where}{key} is not supported: it may change what the head computes")
        refuse_unread(*section.inner.values())


@dataclass(frozen=True)
class Names:
    """Tensor names of a layout."""

    own: Mapping[str, str | tuple[str, ...]]
    """Published names of the parameters that a decoder does not have: one, or several of equally many rows. `*` is the
    number of a layer, or of a row that is stored by itself."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other published names, with the names that are written."""
    ignored: frozenset[str] = frozenset()
    """Other tensors, which are not parameters of the head."""
    layer: str = "layers.0."
    """Prefix of the first layer's tensors."""
    drafted: frozenset[str] = frozenset()
    """Parameters with a row per target token, of which only those of drafted tokens are stored."""

    def published(self, stored: str) -> str:
        name = re.sub(r"^((module|draft_model|model)\.)+", "", stored)
        name = self.aliases.get(name, name)
        return self.layer + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def pieces(self, c: DecoderConfig, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the stored tensors of a parameter, each with its part of `value`."""
        _, number, inner = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        own = self.own.get(f"layers.*.{inner}" if number else name)
        if own is not None:
            if "*" in own and not number:
                return [(str(own).replace("*", str(i)), part) for i, part in enumerate(value)]
            names = [own] if isinstance(own, str) else own
            parts = value.split(len(value) // len(names))
            return [(each.replace("*", number), part) for each, part in zip(names, parts, strict=True)]
        return [(self.published(stored), part) for stored, part in pieces(c, name, value, "hf")]


class HeadTensors(TensorFiles):
    """Tensors of a head's folder under their published names."""

    dtypes: Mapping[str, torch.dtype] = {**PLAIN, "I8": torch.int8}

    def __init__(self, folder: Path, names: Names, num_drafted: int | None = None) -> None:
        super().__init__()
        self.names, self.num_drafted = names, num_drafted
        paths = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(
                f"{WEIGHTS_FILE} is missing; pickles can run code and are never opened here: "
                f"`jetspec export {folder} --format hf --out NEW` converts one"
            )
        self.path = paths[0] if len(paths) == 1 else folder
        for path in paths:
            file = DrafterFile(path) if path.suffix == ".gguf" else open_safetensors(path)
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
        vocab_size, size = head.config.vocab_size, head.config.hidden_size
        for name in sorted(self.entries.keys() & self.names.ignored - expected - {"d2t", "t2d"}):
            shapes: list[tuple[int, ...]] = [(size,)] if "norm" in name else [(vocab_size, size)]
            if "lm_head" in name and self.num_drafted is not None:
                shapes.append((self.num_drafted, size))
            if self.shape(name) not in shapes:
                raise ValueError(f"tensor {name} has shape {self.shape(name)}; it is no copy of the target's")
        dtype = self.dtype(str(self.names.own["fc.weight"])) if dtype == "auto" else dtype
        return read_weights(head, self, find, torch.float32 if dtype == torch.int8 else dtype, device)

    def pieces(self, c: DecoderConfig, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the stored tensors of a parameter. Some writers stack them as we do."""
        if self.num_drafted is not None and name in self.names.drafted:
            value = value[: self.num_drafted]
        parts = self.names.pieces(c, name, value)
        stacked = parts[0][0].replace(".q_proj", ".qkv_proj").replace("mlp.gate_proj", "mlp.gate_up_proj")
        return [(stacked, value)] if stacked != parts[0][0] and stacked in self else parts

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

    def names_of(self, kind: str) -> Names:
        """Returns the tensor names of a kind."""
        return self.names

    def num_drafted(self, config: C) -> int | None:
        """Returns the number of drafted tokens, if only their rows of some tensors are stored."""
        return None

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
        """Adds what the head's files leave to the target.

        A normed tap of the last layer is one of the layer after it, as `DecoderStack.run` counts.
        """
        if config.last_tap != "normed":
            return config
        last = target.num_layers - 1
        return replace(config, tap_layers=tuple(i + (i == last) for i in config.tap_layers))

    def buffers(self, config: C, tensors: HeadTensors, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reads the tensors that are not parameters, and returns parameters of `state` that are not as they were
        stored."""
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
            raise ValueError(
                f"{folder} is a head of kind {kind}, which is not supported; `jetspec heads` lists those that are"
            )
        with errors_name(config_file(folder)):
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
        head = self.read(folder, config, dtype, device)
        head.choices = ChoiceFits.read(folder)
        return head

    def read(self, folder: Path, config: C, dtype: DType = "auto", device: torch.device | str = "cpu") -> H:
        """Reads the weights of a head in a folder and checks them."""
        head = on_meta(self.make, config)
        with errors_name(folder):
            tensors = HeadTensors(folder, self.names_of(str(kind_of(folder))), self.num_drafted(config))
        with errors_name(tensors.path):
            state = tensors.weights(head, dtype, device)
            state |= self.buffers(config, tensors, state)
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
            "last_tap": config.last_tap,
            "num_target_layers": config.num_target_layers,
            "target_hidden_size": config.target_hidden_size or config.layers.hidden_size,
        }
        facts = self.facts(config, str(kind_of(folder)))
        return shared | facts | ({"format": f"{facts['format']} (GGUF)"} if folder.is_file() else {})

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
        last = target.num_layers - 1
        if last in head.tap_layers and head.last_tap is None:
            problems.append(f"it taps layer {last}, the last one; its config must say last_tap raw or normed")
        end = target.num_layers + (head.last_tap == "normed")
        if outside := [i for i in head.tap_layers if not 0 <= i < end]:
            problems.append(f"it taps layer {outside[0]}, the target has layers 0 to {target.num_layers - 1}")
        return problems


def read_last_tap(keys: HeadKeys) -> LastTap | None:
    value = keys.get("last_tap")
    if value not in (None, "raw", "normed"):
        raise ValueError(f"last_tap is {value!r}; it must be raw or normed")
    return value


def layer_ids(key: str, ids: object, first: int, most: int = MAX_LAYERS) -> tuple[int, ...]:
    """Checks numbers of layers, which are counted from `first`, and returns them counted from 0."""
    if not isinstance(ids, list) or not 1 <= len(ids) <= most:
        raise ValueError(f"{key} does not name 1 to {most} layers")
    return tuple(Fields({key: i}).integer(key, first, MAX_LAYERS) - first for i in ids)


def tap_fields(config: HeadConfig | Eagle3Config) -> dict[str, Any]:
    """Returns the keys of config.json that describe the taps, where they are not the usual ones."""
    keys: dict[str, Any] = {}
    if config.target_hidden_size is not None:
        keys["target_hidden_size"] = config.target_hidden_size
    if config.last_tap is not None or (config.num_target_layers or 0) - 1 in config.tap_layers:
        keys["last_tap"] = config.last_tap or "raw"
    return keys


def read_vocabulary(tensors: HeadTensors, size: int, vocab_size: int) -> Tensor:
    """Returns the target's token for each of the head's. `d2t` holds the differences, `t2d` a flag per target token."""
    token = torch.arange(size)
    if "d2t" in tensors:
        added = tensors.exactly("d2t", (size,))
        if added.is_floating_point() or added.dtype == torch.bool:
            raise ValueError(f"tensor d2t is stored as {added.dtype}; it must hold whole numbers")
        token += added.long()
        if token.min() < 0 or token.max() >= vocab_size or len(token.unique()) < size:
            raise ValueError(f"tensor d2t does not name {size} different tokens of a vocabulary of {vocab_size}")
    elif size != vocab_size:
        raise ValueError(f"tensor d2t is missing: it maps the {size} drafted tokens to {vocab_size} of the target")
    if "t2d" in tensors:
        taken = tensors.exactly("t2d", (vocab_size,)).bool()
        if not torch.equal(taken.nonzero()[:, 0], token.sort().values):
            raise ValueError("tensors d2t and t2d contradict each other")
    return token


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
    """Returns the contents of config.json, or the metadata of a GGUF file in its form; empty if there is none."""
    with errors_name(folder):
        if folder.suffix == ".gguf":
            return DrafterFile(folder).config()
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
        "rope_scaling": rope_to_hf(c.rope),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
