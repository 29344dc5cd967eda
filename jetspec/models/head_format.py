"""Draft heads in the published JetSpec and DFlash layout, with our edge term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from jetspec.config import MAX_DEPTH
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.families import MAX_LAYERS, Fields, config_from_hf
from jetspec.models.head_folder import HeadFormat, Names, TargetShape, agreed, layer_fields, table
from jetspec.models.hub import DEFAULT_MODEL, shipped_head

MAX_BLOCK = 1 + MAX_DEPTH
# Spellings of two flags, inside dflash_config and beside it.
CAUSAL = ("dflash_config.causal_head", "dflash_config.causal", "is_causal")
SHIFTED = (
    *("dflash_config.shift_label", "dflash_config.draft_shift", "dflash_config.sample_from_anchor"),
    *("shift_label", "draft_shift", "sample_from_anchor"),
)

NAMES = Names(
    own={
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "hidden_norm.weight",
        "adapter.weight": "hidden_dim_adapter.proj.weight",
        "edge.predecessor": "edge.predecessor.weight",
        "edge.successor": "edge.successor.weight",
        "edge.gate.weight": "edge.gate.weight",
    },
    aliases={"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
    # Copies of the target's matrices, which some writers add.
    ignored=frozenset({"embed_tokens.weight", "lm_head.weight"}),
)


class BlockFormat(HeadFormat[HeadConfig, DraftHead]):
    """The published JetSpec and DFlash layout, with our edge term."""

    kinds = ("DFlash",)
    make = DraftHead
    names = NAMES

    def parse(self, raw: Mapping[str, Any]) -> HeadConfig:
        own = table(raw, "dflash_config")
        if unknown := [key for key in ("use_swa", "attention_sink_bias") if own.get(key)]:
            raise ValueError(f"dflash_config.{unknown[0]} is not supported")
        layers, outer, inner = _layers_config(raw), Fields(raw), Fields(own)
        num_target_layers = outer.integer("num_target_layers", 0, MAX_LAYERS, 0) or None
        target_hidden_size = inner.size("target_hidden_size", layers.hidden_size)
        causal, edge = _flag(raw, CAUSAL), None
        if own.get("edge") is not None:
            c = Fields(table(own, "edge"))
            edge = EdgeConfig(c.size("rank"), c.flag("gate", True), c.real("gate_bias", -1e6, 1e6, 1.0))
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
            edge=edge,
        )

    def write_config(self, config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the contents of config.json, with the causal flag in all spellings that other readers know.

        They apply the flag to every layer; without it, only layers with a window are causal.
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
            own["edge"] = asdict(config.edge)
        out: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            **layer_fields(c, dtype),
            "layer_types": ["sliding_attention" if c.window(i) else "full_attention" for i in range(c.num_layers)],
            "sliding_window": next(iter(windows), None),
            "use_sliding_window": bool(windows),
            "max_window_layers": c.num_layers,
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config": own,
        }
        if not config.causal_windows:
            out["is_causal"] = own["causal"] = own["causal_head"] = config.causal
        return out

    def facts(self, config: HeadConfig, kind: str) -> dict[str, Any]:
        return {
            "format": ("JetSpec" if config.causal else "DFlash") + (" with edges" if config.edge else ""),
            "windows": list(config.layers.windows),
            "block_size": config.block_size,
            "mask_token": config.mask_token,
            "causal": config.causal,
            "shifted": config.shifted,
            "edge_rank": config.edge.rank if config.edge else None,
        }

    def misfits(self, head: HeadConfig, target: TargetShape) -> list[str]:
        problems, size = super().misfits(head, target), head.layers.hidden_size
        if size != target.hidden_size:
            problems.append(f"its hidden size is {size}, the target's is {target.hidden_size}")
        if head.mask_token >= target.vocab_size:
            problems.append(
                f"its mask token {head.mask_token} is outside the target's vocabulary of {target.vocab_size}"
            )
        return problems


def _layers_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the layers as Qwen3's, whatever the model type. `layer_types` decides which ones have a window."""
    if "rope_theta" not in {**raw, **table(raw, "rope_parameters")}:
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


def _flag(raw: Mapping[str, Any], spellings: tuple[str, ...]) -> bool | None:
    """Returns the value of a flag in any of its spellings; None if there is none."""
    flat = {**raw, **{f"dflash_config.{key}": value for key, value in table(raw, "dflash_config").items()}}
    return agreed({key: Fields(flat).flag(key) for key in spellings if flat.get(key) is not None})


BLOCK = BlockFormat()
load_head, save_head, read_config = BLOCK.load, BLOCK.save, BLOCK.read_config
check_fits, require_fit, write_config = BLOCK.misfits, BLOCK.require_fit, BLOCK.write_config


def shipped_head_name(target: DecoderConfig) -> str | None:
    """Returns the name of a shipped head that was trained for a model of this shape, such as another quantisation."""
    folder = shipped_head(DEFAULT_MODEL)
    if folder is None:
        return None
    head = read_config(folder)
    is_same = not check_fits(head, target) and (head.layers.rope, head.layers.max_len) == (target.rope, target.max_len)
    return DEFAULT_MODEL if is_same else None
