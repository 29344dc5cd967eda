"""Draft heads on disk: the published JetSpec and DFlash layout, read and written, our edge term beside it.

A folder with config.json and safetensors. Nothing in it is ever executed. Other kinds of heads are recognised and
refused by name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetspec.models.decoder import DecoderConfig, RopeConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.families import MAX_LAYERS, Fields, config_from_hf, parts_of
from jetspec.models.gguf import GGUFFile
from jetspec.models.hub import resolve
from jetspec.models.weights import DType, read_json

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
ARCHITECTURES = {"DFlashDraftModel", "Qwen3DFlashDraftModel"}
MAX_BLOCK = 256
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}
SCALE = "_scale"
"""A matrix stored as int8 has a second tensor of this ending: a factor per row."""

# The spellings of a flag: some inside dflash_config, some beside it.
CAUSAL = ("dflash_config.causal_head", "dflash_config.causal", "is_causal")
SHIFTED = (
    *("dflash_config.shift_label", "dflash_config.draft_shift", "dflash_config.sample_from_anchor"),
    *("shift_label", "draft_shift", "sample_from_anchor"),
)

OWN = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "adapter.weight": "hidden_dim_adapter.proj.weight",
    "edge.predecessor": "edge.predecessor.weight",
    "edge.successor": "edge.successor.weight",
    "edge.gate.weight": "edge.gate.weight",
}
"""Our names -> the published ones, for what a head has and a decoder has not."""
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
BORROWED = {"embed_tokens.weight", "lm_head.weight"}
"""Copies of the target's matrices, which some writers add. A head uses the target's own."""


def load_head(
    path_or_id: str | Path,
    target: DecoderConfig | None = None,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
) -> DraftHead:
    """A head from a folder or a Hugging Face id, for inference. `auto` is the dtype of the file, float32 for int8.

    With a target given, the head must fit it.
    """
    folder = resolve(path_or_id)
    config = read_config(folder)
    if target is not None and (problems := check_fits(config, target)):
        raise ValueError(f"{path_or_id} is a head for another model: {'; '.join(problems)}")
    with torch.device("meta"):
        head = DraftHead(config)
    try:
        tensors = _Tensors(folder)
        tensors.check(head)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    stored_dtype = tensors.dtype("fc.weight") if dtype == "auto" else dtype
    if stored_dtype == torch.int8:
        stored_dtype = torch.float32
    state = {}
    for name, parameter in head.named_parameters():
        state[name] = torch.empty(parameter.shape, dtype=stored_dtype, device=device)
        tensors.read(name, config, state[name])
    head.load_state_dict(state, assign=True)
    return head.to(device).requires_grad_(False).eval()


def save_head(
    head: DraftHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16, card: str | None = None
) -> None:
    """Write a head in the published layout, with a model card if given. The folder appears complete or not at all.

    `dtype` int8 stores each row of a matrix as 8-bit numbers with a factor: half the size, for JetSpec alone to read.
    It replaces an older head; a folder that holds anything else is not touched.
    """
    folder = Path(folder).absolute()
    _check_replaceable(folder)
    config = write_config(head.head_config, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        fresh.mkdir()
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (fresh / CARD_FILE).write_text(card, encoding="utf-8")
        write_tensors(_published_tensors(head, dtype), fresh / WEIGHTS_FILE)
        if folder.exists():
            os.replace(folder, old)
        os.replace(fresh, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


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


def describe_head(folder: str | Path) -> dict[str, Any] | None:
    """What a folder says about the head in it. None: it holds no head.

    Of a kind that JetSpec cannot run it tells only `format` and `problem`.
    """
    folder = Path(folder)
    if kind := _foreign(folder):
        return {"format": kind, "problem": _refusal(folder, kind)}
    if not _is_head(folder):
        return None
    config = read_config(folder)
    with torch.device("meta"):
        head = DraftHead(config)
    return {
        "format": ("JetSpec" if config.causal else "DFlash") + (" with edges" if config.edge else ""),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "layers": config.layers.num_layers,
        "hidden_size": config.layers.hidden_size,
        "vocab_size": config.layers.vocab_size,
        "windows": list(config.layers.windows),
        "block_size": config.block_size,
        "depth": config.depth,
        "mask_token": config.mask_token,
        "causal": config.causal,
        "shifted": config.shifted,
        "tap_layers": list(config.tap_layers),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size or config.layers.hidden_size,
        "edge_rank": config.edge.rank if config.edge else None,
    }


def check_fits(head: HeadConfig, target: DecoderConfig) -> list[str]:
    """Why a head cannot serve a target, in plain words. Empty: it can."""
    problems = []
    if head.target_hidden_size not in (None, target.hidden_size):
        problems.append(f"it reads states of size {head.target_hidden_size}, the target's have {target.hidden_size}")
    if head.layers.hidden_size != target.hidden_size:
        problems.append(f"its hidden size is {head.layers.hidden_size}, the target's is {target.hidden_size}")
    if head.layers.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {head.layers.vocab_size} tokens, the target's has {target.vocab_size}")
    if head.num_target_layers not in (None, target.num_layers):
        problems.append(f"it was made for {head.num_target_layers} layers, the target has {target.num_layers}")
    if outside := [i for i in head.tap_layers if not 0 <= i < target.num_layers]:
        problems.append(f"it taps layer {outside[0]}, the target has layers 0 to {target.num_layers - 1}")
    if head.mask_token >= target.vocab_size:
        problems.append(f"its mask token {head.mask_token} is outside the target's vocabulary of {target.vocab_size}")
    return problems


def read_config(folder: Path) -> HeadConfig:
    """The config of a head's folder. Every number in it is checked here and trusted afterwards."""
    if kind := _foreign(folder):
        raise ValueError(_refusal(folder, kind))
    if not _is_head(folder):
        raise ValueError(f"{folder} is not a draft head: it needs a {CONFIG_FILE} that names DFlashDraftModel")
    try:
        return _from_published(_raw_config(folder))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None


def _from_published(raw: Mapping[str, Any]) -> HeadConfig:
    own = _table(raw, "dflash_config")
    if unknown := [key for key in ("use_swa", "attention_sink_bias") if own.get(key)]:
        raise ValueError(f"dflash_config.{unknown[0]} is not supported")
    layers, outer, inner = _layers_config(raw), Fields(raw), Fields(own)
    num_target_layers = outer.integer("num_target_layers", 0, MAX_LAYERS, 0) or None
    target_hidden_size = inner.size("target_hidden_size", layers.hidden_size)
    causal = _flag(raw, CAUSAL)
    return HeadConfig(
        layers=layers,
        tap_layers=_tap_layers(own, layers.num_layers, num_target_layers),
        mask_token=inner.integer("mask_token_id", 0, layers.vocab_size - 1),
        block_size=(outer if "block_size" in raw else inner).integer("block_size", 2, MAX_BLOCK),
        causal=bool(causal),
        causal_windows=causal is None and any(layers.windows),
        shifted=bool(_flag(raw, SHIFTED)),
        target_hidden_size=None if target_hidden_size == layers.hidden_size else target_hidden_size,
        num_target_layers=num_target_layers,
        edge=_edge_config(Fields(_table(own, "edge"))) if own.get("edge") is not None else None,
    )


def _layers_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A head's layers are Qwen3's, whatever the model type says. Where layers have kinds, these say who is windowed."""
    if "rope_theta" not in {**raw, **_table(raw, "rope_parameters")}:
        raise ValueError("rope_theta is missing; a guess would only lower the acceptance")
    changes: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": False}
    if isinstance(kinds := raw.get("layer_types"), list):
        changes["use_sliding_window"] = is_windowed = any(kind != "full_attention" for kind in kinds)
        changes["sliding_window"] = Fields(raw).size("sliding_window") if is_windowed else None
    return config_from_hf({**raw, **changes})


def _tap_layers(own: Mapping[str, Any], num_layers: int, num_target_layers: int | None) -> tuple[int, ...]:
    ids = own.get("target_layer_ids")
    if ids is None and num_target_layers is None:
        raise ValueError("dflash_config.target_layer_ids is missing, and so is num_target_layers")
    if ids is None:
        return default_tap_layers(num_layers, num_target_layers or 0)
    if not isinstance(ids, list) or not 1 <= len(ids) <= MAX_LAYERS:
        raise ValueError("dflash_config.target_layer_ids is not a list of layers")
    return tuple(Fields({"target_layer_ids": i}).integer("target_layer_ids", 0, MAX_LAYERS) for i in ids)


def _edge_config(c: Fields) -> EdgeConfig:
    return EdgeConfig(c.size("rank"), c.flag("gate", True), c.real("gate_bias", -1e6, 1e6, 1.0))


def _flag(raw: Mapping[str, Any], spellings: tuple[str, ...]) -> bool | None:
    """What any of the spellings says. None: nothing does."""
    flat = {**raw, **{f"dflash_config.{key}": value for key, value in _table(raw, "dflash_config").items()}}
    said = {key: Fields(flat).flag(key) for key in spellings if flat.get(key) is not None}
    if len(set(said.values())) > 1:
        raise ValueError("contradictory: " + ", ".join(f"{key} is {str(said[key]).lower()}" for key in said))
    return next(iter(said.values()), None)


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is not a table")
    return value


def write_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of config.json. Readers elsewhere know one spelling of the causal flag each: all are written.

    They take it for every layer. That only windowed layers are causal is said by leaving it out.
    """
    c = config.layers
    assert c.qk_norm and c.qkv_bias == c.out_bias and not c.mlp_bias and c.moe is None, "the layers are not Qwen3's"
    windows = {window for window in c.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"the layers have windows of {sorted(windows)}; the format holds a single size")
    own: dict[str, Any] = {"target_layer_ids": list(config.tap_layers), "mask_token_id": config.mask_token}
    if config.target_hidden_size is not None:
        own["target_hidden_size"] = config.target_hidden_size
    if config.shifted:
        own["shift_label"] = True
    if config.edge is not None:
        own["edge"] = {"rank": config.edge.rank, "gate": config.edge.gate, "gate_bias": config.edge.gate_bias}
    out: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
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
        "layer_types": ["sliding_attention" if c.window(i) else "full_attention" for i in range(c.num_layers)],
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "max_window_layers": c.num_layers,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "dflash_config": own,
    }
    if not config.causal_windows:
        out["is_causal"] = own["causal"] = own["causal_head"] = config.causal
    return out


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.divisors:
        raise ValueError("rotary frequencies with a factor each cannot be written; give the head a plain rope")
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


def _raw_config(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where there is none."""
    try:
        return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _is_head(folder: Path) -> bool:
    raw = _raw_config(folder)
    return bool(ARCHITECTURES & _architectures(raw)) or "dflash_config" in raw


def _foreign(path: Path) -> str | None:
    """The kind of a head that is not ours, by the marks it is known for."""
    if path.suffix == ".gguf":
        is_head = GGUFFile(path).metadata.get("general.architecture") == "dflash"
        return "GGUF (dflash)" if is_head else None
    raw = _raw_config(path)
    names, own = _architectures(raw), _table(raw, "dflash_config")
    marks = {
        f"speculators ({raw.get('speculators_model_type')})": "speculators_model_type" in raw,
        "DSpark": {"Qwen3DSparkModel", "DSparkDraftModel"} & names or "markov_rank" in {*raw, *own},
        "DFlash2": "DFlash2DraftModel" in names or "selector_rank" in own,
        "Domino": own.get("projector_type") == "domino",
        "EAGLE-3": any("Eagle3" in name for name in names) or "draft_vocab_size" in raw,
    }
    return next((kind for kind, found in marks.items() if found), None)


def _refusal(path: Path, kind: str) -> str:
    return f"{path} is a {kind} head, which JetSpec cannot run yet; it runs JetSpec and DFlash heads"


def _architectures(raw: Mapping[str, Any]) -> set[str]:
    names = raw.get("architectures")
    return set(map(str, names)) if isinstance(names, list) else set()


def _stored_parts(name: str, c: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Names of the tensors behind one of our parameters, and the rows of each. 0: all."""
    if name in OWN:
        yield OWN[name], 0
        return
    names = [part.hf.removeprefix("model.") for part in parts_of(name, is_expert=False)]
    key_rows = c.num_kv_heads * c.head_dim
    rows = {1: [0], 2: [c.inner_size] * 2, 3: [c.num_heads * c.head_dim, key_rows, key_rows]}[len(names)]
    yield from zip(names, rows, strict=True)


@dataclass(frozen=True)
class _Piece:
    """A stored tensor and the part of one of our parameters that it fills."""

    name: str
    out: Tensor


class _Tensors:
    """The tensors of a head's folder under their published names. Shapes and dtypes are known before any is read."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, tuple[Any, str]] = {}
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
            name = stored.removeprefix("model.")
            name = ALIASES.get(name, name)
            if name in self.files:
                raise ValueError(f"tensor {name} is stored twice")
            if name not in BORROWED:
                self.files[name] = file, stored

    def dtype(self, name: str) -> torch.dtype:
        file, stored = self.files[name]
        kind = file.get_slice(stored).get_dtype()
        if kind not in STORED:
            raise ValueError(f"tensor {name} is stored as {kind}; {', '.join(STORED)} can be read")
        return STORED[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self.files[name]
        return tuple(file.get_slice(stored).get_shape())

    def check(self, head: DraftHead) -> None:
        """Names, shapes and dtypes are those that the config asks for, no more and no fewer."""
        pieces = [p for name, value in head.named_parameters() for p in self.pieces(name, head.config, value)]
        wanted = {piece.name: tuple(piece.out.shape) for piece in pieces}
        if missing := [name for name in wanted if name not in self.files]:
            raise ValueError(f"tensors are missing: {_some(missing)}")
        scales = {name + SCALE for name in wanted if self.dtype(name) == torch.int8}
        if missing := [name for name in scales if name not in self.files]:
            raise ValueError(f"tensors are missing: {_some(missing)}")
        if unknown := [name for name in self.files if name not in wanted and name not in scales]:
            raise ValueError(f"tensors are not part of the config: {_some(unknown)}")
        for name, shape in {**wanted, **{name: (wanted[name.removesuffix(SCALE)][0], 1) for name in scales}}.items():
            self.dtype(name)
            if self.shape(name) != shape:
                raise ValueError(f"tensor {name} has shape {self.shape(name)}; the config asks for {shape}")

    def read(self, name: str, config: HeadConfig, out: Tensor) -> None:
        """Fill one of our parameters."""
        for piece in self.pieces(name, config.layers, out):
            value = self.tensor(piece.name)
            if value.dtype == torch.int8:
                value = value.float() * self.tensor(piece.name + SCALE).float()
            piece.out.copy_(value)

    def tensor(self, name: str) -> Tensor:
        file, stored = self.files[name]
        return file.get_tensor(stored)

    def pieces(self, name: str, c: DecoderConfig, out: Tensor) -> Iterator[_Piece]:
        """Where the stored tensors go: rows of ours, which some writers stack as we do."""
        parts = dict(_stored_parts(name, c))
        first = next(iter(parts))
        stacked = first.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
        if len(parts) == 1 or stacked in self.files:
            yield _Piece(first if len(parts) == 1 else stacked, out)
        else:
            yield from map(_Piece, parts, out.split(list(parts.values())))


def _published_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        stored = dict(_stored_parts(name, head.config))
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a head is saved as a folder")
    if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN_FILES):
        raise ValueError(f"{folder} holds other files ({_some(others)}); save the head in a folder of its own")
