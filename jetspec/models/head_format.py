"""Draft heads in the published JetSpec and DFlash layout, with our edge term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from jetspec.config import MAX_DEPTH
from jetspec.models.block_conv import ConvConfig
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.families import MAX_LAYERS, MAX_VOCAB, Fields
from jetspec.models.head_folder import (
    HeadFormat,
    HeadKeys,
    HeadTensors,
    Names,
    TargetShape,
    agreed,
    kind_of_config,
    layer_fields,
    layer_ids,
    read_last_tap,
    read_vocabulary,
    refuse_unread,
    table,
    tap_fields,
)
from jetspec.models.path_terms import PathConfig

MAX_BLOCK = 1 + MAX_DEPTH
PROJECTORS = ("dspark", "domino")
"""Values of `projector_type` that decide the kind of a head."""
CAUSAL = ("causal_head", "causal", "is_causal")
SHIFTED = ("shift_label", "draft_shift", "sample_from_anchor")
"""Spellings of two flags."""

OWN: dict[str, str | tuple[str, ...]] = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "adapter.weight": "hidden_dim_adapter.proj.weight",
    "edge.predecessor": "edge.predecessor.weight",
    "edge.successor": "edge.successor.weight",
    "edge.gate.weight": "edge.gate.weight",
    **{
        f"layers.*.{conv}_conv.{leaf}": f"layers.*.{conv}_conv.{leaf}"
        for conv in ("attention", "mlp")
        for leaf in ("base_kernel", "kernel_projection.weight")
    },
    "lm_head.weight": "lm_head.weight",
}
MARKOV: dict[str, str | tuple[str, ...]] = {
    **{f"{term}.predecessor": "markov_head.markov_w1.weight" for term in ("edge", "path")},
    **{f"{term}.successor": "markov_head.markov_w2.weight" for term in ("edge", "path")},
    **{f"path.gate.{leaf}": f"markov_head.gate_proj.{leaf}" for leaf in ("weight", "bias")},
    **{f"path.joint.{leaf}": f"markov_head.joint_proj.{leaf}" for leaf in ("weight", "bias")},
    **{f"confidence.{leaf}": f"confidence_head.proj.{leaf}" for leaf in ("weight", "bias")},
}
SELECTOR: dict[str, str | tuple[str, ...]] = {
    "edge.predecessor": "candidate_selector.predecessor_codebook",
    "edge.successor": "candidate_selector.successor_codebook",
    "edge.gate.weight": "candidate_selector.hidden_projection.weight",
}
DOMINO: dict[str, str | tuple[str, ...]] = {
    "path.input.weight": "prefix_gru.weight_ih_l0",
    "path.recurrent.weight": "prefix_gru.weight_hh_l0",
    "path.project.weight": "embed_proj.0.weight",
    "path.successor": "embed_proj.2.weight",
}
REFINER: dict[str, str | tuple[str, ...]] = {
    "path.predecessor": "refiner_head.token_embed.weight",
    "path.own.weight": "refiner_head.down_h.weight",
    "path.mean.weight": "refiner_head.down_g.weight",
    "path.input.weight": "refiner_head.in_proj.weight",
    "path.mix": "refiner_head.mix_l",
    "path.gate_up.weight": ("refiner_head.mlp_gate.weight", "refiner_head.mlp_up.weight"),
    "path.down.weight": "refiner_head.mlp_down.weight",
    "path.successor": "refiner_head.readout.weight",
}
CORRECTION: dict[str, str | tuple[str, ...]] = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
    "tap_weights": "layer_fusion_weights",
    "path.hidden_norm.weight": "hidden_correction.hidden_norm.weight",
    "path.embed_norm.weight": "hidden_correction.embed_norm.weight",
    "path.gate_up.weight": ("hidden_correction.gate_proj.weight", "hidden_correction.up_proj.weight"),
    "path.down.weight": "hidden_correction.down_proj.weight",
}
NAMES = Names(
    own=OWN,
    aliases={
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
        # Early files of SpecForge.
        **{f"logit_head.{name}": name for own in (MARKOV, DOMINO) for name in own.values() if isinstance(name, str)},
    },
    # Copies of the target's embedding, lm_head and last norm, which some writers add, and the maps of a reduced
    # vocabulary, which are read apart.
    ignored=frozenset(
        {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d"}
    ),
    drafted=frozenset({"edge.successor", "path.successor"}),
)
KINDS: dict[str, Names] = {
    "DFlash": NAMES,
    "DSpark": replace(NAMES, own=OWN | MARKOV),
    "SpecForge DSpark": replace(NAMES, own=OWN | MARKOV),
    "Domino": replace(NAMES, own=OWN | DOMINO),
    "DFlash2": replace(NAMES, own=OWN | SELECTOR),
    "DFly": replace(NAMES, own=OWN | CORRECTION),
    "speculators (dflash)": NAMES,
    "speculators (dspark)": replace(NAMES, own=OWN | MARKOV),
    "speculators (dflash2)": replace(NAMES, own=OWN | SELECTOR),
    "speculators (xpress)": replace(NAMES, own=OWN | REFINER),
}
"""Kinds of heads that draft a block in one pass, with their tensor names."""


class BlockFormat(HeadFormat[HeadConfig, DraftHead]):
    """All layouts of heads that draft a block in one pass. Writes the JetSpec and DFlash layout, with our edge term."""

    kinds = tuple(KINDS)
    make = DraftHead
    names = NAMES

    def names_of(self, kind: str) -> Names:
        return KINDS[kind]

    def num_drafted(self, config: HeadConfig) -> int | None:
        return config.draft_vocab_size

    def parse(self, raw: Mapping[str, Any]) -> HeadConfig:
        kind = kind_of_config(raw)
        assert kind is not None
        # Own keys are read from the table of their own first, layers at the top alone, as the authors do.
        own = [("dflash_config.", table(raw, "dflash_config"))] if kind not in ("DSpark", "DFly") else []
        keys = HeadKeys(*own, ("", raw))
        inner, read = HeadKeys(("", raw)), _read_published
        if kind.startswith("speculators"):
            inner = HeadKeys(("transformer_layer_config.", table(raw, "transformer_layer_config")))
            read = _read_speculators
        layers = _layers_config(inner)
        config = _with_terms(kind, keys, read(kind, keys, layers))
        if keys.get("projector_type") not in (None, "dflash", *(p for p in PROJECTORS if p in kind.lower())):
            raise ValueError(f"projector_type {keys['projector_type']!r} is not supported in a head of kind {kind}")
        refuse_unread(keys, inner)
        narrow = [w for w, causal in zip(layers.windows, config.causal_layers, strict=False) if w and not causal]
        if narrow and min(narrow) < config.block_size:
            raise ValueError(f"sliding_window {min(narrow)} is smaller than the block of {config.block_size} slots")
        return config

    def buffers(self, config: HeadConfig, tensors: HeadTensors, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        size, vocab_size = config.draft_vocab_size, config.layers.vocab_size
        token_of = read_vocabulary(tensors, size or vocab_size, vocab_size)
        if size is None:
            if not torch.equal(token_of, torch.arange(vocab_size)):
                raise ValueError("tensor d2t maps tokens to others, but the config has no draft_vocab_size")
            return {}
        full = {
            name: torch.zeros_like(state[name]).index_copy_(0, token_of.to(state[name].device), state[name][:size])
            for name in tensors.names.drafted & state.keys()
        }
        return {"token_of": token_of, **full}

    def unwritable(self, config: HeadConfig) -> str | None:
        """Returns the part of a head that our own layout and training do not know, if there is one."""
        parts = {
            "a term of the path": config.path,
            "a confidence": config.confidence,
            "a reduced vocabulary": config.draft_vocab_size,
            "mixtures of taps": config.fused_taps,
            "scaled embeddings or logits": config.softcap or (config.embedding_scale, config.output_scale) != (1, 1),
        }
        return next((f"it has {part}" for part, value in parts.items() if value), None)

    def write_config(self, config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the contents of config.json, with the causal flag in all spellings that other readers know.

        They apply the flag to every layer; without it, only layers with a window are causal.
        """
        c = config.layers
        assert c.qk_norm and c.qkv_bias == c.out_bias and not c.mlp_bias and c.moe is None, "the layers are not Qwen3's"
        if problem := self.unwritable(config):
            raise ValueError(f"the JetSpec layout cannot hold this head: {problem}")
        windows = {window for window in c.windows if window is not None}
        if len(windows) > 1:
            raise ValueError(f"the layers have windows of {sorted(windows)}; the format holds a single size")
        own: dict[str, Any] = {"target_layer_ids": list(config.tap_layers), "mask_token_id": config.mask_token}
        own |= tap_fields(config)
        if config.shifted:
            own["shift_label"] = True
        if config.edge is not None:
            own["edge"] = {key: value for key, value in asdict(config.edge).items() if value is not None}
        if config.conv is not None:
            own["conv"] = asdict(config.conv)
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
            "layout": "anchor-first" if config.shifted else "fill-in",
            "windows": list(config.layers.windows),
            "block_size": config.block_size,
            "mask_token": config.mask_token,
            "causal": config.causal,
            "shifted": config.shifted,
            "edge_rank": config.edge.rank if config.edge else None,
            "path_term": config.path.kind if config.path else None,
            "convolution_taps": config.conv.taps if config.conv else None,
            "confidence": config.confidence,
            "draft_vocab_size": config.draft_vocab_size,
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


def _layers_config(keys: HeadKeys) -> DecoderConfig:
    """Reads the layers as Qwen3's, whatever the model type. `layer_types` decides which ones have a window.

    Without `use_sliding_window`, transformers drops the windows that `layer_types` names, and other readers keep them.
    """
    rope = keys.get("rope_parameters") or {}
    if keys.get("rope_theta") is None and (not isinstance(rope, Mapping) or rope.get("rope_theta") is None):
        raise ValueError("rope_theta is missing; a guess would only lower the acceptance")
    changes: dict[str, Any] = {"model_type": "qwen3"}
    if isinstance(kinds := keys.get("layer_types"), list):
        is_windowed = any(kind != "full_attention" for kind in kinds)
        if is_windowed and not keys.flag("use_sliding_window"):
            raise ValueError("use_sliding_window is not true, but layer_types names layers with a window")
        changes["use_sliding_window"] = is_windowed
        changes["sliding_window"] = keys.size("sliding_window") if is_windowed else None
    return replace(keys.layers(changes), tied_embedding=False)


def _read_published(kind: str, keys: HeadKeys, layers: DecoderConfig) -> HeadConfig:
    """Reads the layouts of authors: layers are counted by their outputs, from 0."""
    for key in ("rope_is_neox_style", "is_neox_style"):
        if not keys.flag(key, True):
            raise ValueError(f"{key} false is not supported")
    if keys.get("swa_window_size") not in (None, next(filter(None, layers.windows), None)) or keys.flag("use_swa"):
        raise ValueError("swa_window_size and use_swa are not supported")
    for key, known in (("model_arch", ("dflash", "dfly")), ("fusion_type", ("concat_fc",))):
        if keys.get(key, known[0]) not in known:
            raise ValueError(f"{key} {keys[key]!r} is not supported")
    counts = [(key, keys.integer(key, 0, MAX_LAYERS, 0)) for key in ("num_target_layers", "target_num_hidden_layers")]
    depths = {key: count for key, count in counts if count}
    tap_layers = _tap_layers(keys, "target_layer_ids", 0, layers.num_layers, depths.get("num_target_layers"))
    is_too_small = depths.get("num_target_layers", MAX_LAYERS) <= max(tap_layers)
    if depths.get("num_target_layers") == len(tap_layers) and (is_too_small or len(depths) > 1):
        del depths["num_target_layers"]  # some writers count the taps there
    num_target_layers = agreed(depths)
    if num_target_layers is not None and num_target_layers <= max(tap_layers):
        raise ValueError(f"{', '.join(depths)} is {num_target_layers}, but layer {max(tap_layers)} is tapped")
    target_hidden_size = keys.size("target_hidden_size", layers.hidden_size)
    causal, shifted, last_tap = _flag(keys, CAUSAL), _flag(keys, SHIFTED), read_last_tap(keys)
    # Heads with all spellings of the flag were written by JetSpec, which taps the last layer itself.
    may_tap_last = num_target_layers in (None, 1 + max(tap_layers))
    if last_tap is None and may_tap_last and all(key in keys for key in CAUSAL):
        last_tap = "raw"
    scales = {key: keys.real(key, 1e-6, 1e6) for key in ("output_multiplier", "logit_scale") if key in keys}
    return HeadConfig(
        layers=layers,
        tap_layers=tap_layers,
        mask_token=keys.integer("mask_token_id", 0, layers.vocab_size - 1),
        block_size=keys.integer("block_size", 2, MAX_BLOCK, 16),
        causal=bool(causal),
        causal_windows=causal is None and any(layers.windows),
        shifted="DSpark" in kind if shifted is None else shifted,
        target_hidden_size=None if target_hidden_size == layers.hidden_size else target_hidden_size,
        num_target_layers=num_target_layers,
        embedding_scale=keys.real("input_embedding_scale", 0, 1e6, 1.0),
        output_scale=agreed(scales) or 1.0,
        softcap=keys.real("final_logit_softcapping", 0, 1e6, 0.0) or None,
        draft_vocab_size=_draft_vocab_size(keys, layers),
        last_tap=last_tap,
    )


def _read_speculators(kind: str, keys: HeadKeys, layers: DecoderConfig) -> HeadConfig:
    """Reads the layouts of speculators: the embedding counts as layer 0, layers without a window are never causal."""
    if keys.size("target_hidden_size", layers.hidden_size) != layers.hidden_size:
        raise ValueError("target_hidden_size differs from the head's hidden_size; that is not supported")
    is_open = keys.flag("sliding_window_non_causal", "dflash2" in kind)
    return HeadConfig(
        layers=layers,
        tap_layers=_tap_layers(keys, "aux_hidden_state_layer_ids", 1, layers.num_layers, None),
        mask_token=keys.integer("mask_token_id", 0, layers.vocab_size - 1),
        block_size=keys.integer("block_size", 2, MAX_BLOCK, 8),
        causal=False,
        causal_windows=any(layers.windows) and not is_open,
        shifted=keys.flag("sample_from_anchor", "dspark" in kind),
        draft_vocab_size=_draft_vocab_size(keys, layers, default=32_000),
        last_tap=read_last_tap(keys),
    )


def _with_terms(kind: str, keys: HeadKeys, config: HeadConfig) -> HeadConfig:
    """Reads what the kinds add to the backbone."""
    if kind == "DFlash" and keys.get("conv") is not None:
        own = Fields(table(keys, "conv"))
        config = replace(config, conv=ConvConfig(own.size("taps"), own.size("group")))
    if kind == "DFlash" and keys.get("edge") is not None:
        e = Fields(table(keys, "edge"))
        count = e.integer("candidates", 0, MAX_VOCAB, 0) or None
        term = EdgeConfig(e.size("rank"), e.flag("gate", True), e.real("gate_bias", -1e6, 1e6, 1.0), count)
        return replace(config, edge=term)
    if "DSpark" in kind or "dspark" in kind:
        return _with_markov(keys, config, kind.startswith("speculators"))
    if kind == "Domino":
        rank, inner = keys.size("emb_dim"), keys.size("gru_hidden_dim")
        first = 1 + keys.integer("pure_draft_prefix_len", 0, MAX_BLOCK, 0)
        return replace(config, path=PathConfig("gru", rank, inner, first))
    if "DFlash2" in kind or "dflash2" in kind:
        edge_config = EdgeConfig(keys.size("selector_rank", 256), True, 0.0, keys.size("selector_top_k", 16))
        conv = ConvConfig(keys.size("conv_kernel_size", 2), keys.size("conv_group_size", 16))
        return replace(config, edge=edge_config, conv=conv)
    if "xpress" in kind:
        rank = keys.size("xpress_rank", 256)
        return replace(config, path=PathConfig("mixed", rank, rank * keys.size("xpress_mlp_ratio", 2)))
    if kind == "DFly":
        if not keys.flag("enable_hidden_correction"):
            return replace(config, fused_taps=True)
        size = config.layers.hidden_size
        inner = keys.size("hidden_correction_intermediate_size", size)
        return replace(config, fused_taps=True, path=PathConfig("corrected", size, inner))
    return config


def _with_markov(keys: HeadKeys, config: HeadConfig, is_speculators: bool) -> HeadConfig:
    """Reads the Markov and confidence heads of DSpark. Writers differ in what absent keys mean."""
    rank = keys.integer("markov_rank", 0, MAX_VOCAB, 256 if is_speculators else 0)
    kind = keys.get("markov_head_type", "vanilla")
    if rank and kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"markov_head_type {kind!r} is not supported; choose one of vanilla, gated, rnn")
    if keys.get("attention_mode", "gqa") not in ("gqa", "mha"):  # they differ in the number of heads, which is read
        raise ValueError(f"attention_mode {keys['attention_mode']!r} is not supported")
    if rank and kind == "vanilla":
        config = replace(config, edge=EdgeConfig(rank, gate=False, gate_bias=1.0))
    elif rank:
        config = replace(config, path=PathConfig("gated" if kind == "gated" else "recurrent", rank))
    is_trained = keys.real("confidence_head_alpha", 0, 1e6, float(is_speculators)) > 0
    with_parent = keys.flag("confidence_head_with_markov", is_speculators)
    if keys.flag("enable_confidence_head", is_trained):
        if with_parent and not rank:
            raise ValueError("confidence_head_with_markov needs a markov_rank above 0")
        config = replace(config, confidence="state_and_parent" if with_parent else "state")
    return config


def _draft_vocab_size(keys: HeadKeys, layers: DecoderConfig, default: int | None = None) -> int | None:
    size = keys.integer("draft_vocab_size", 1, layers.vocab_size, default or layers.vocab_size)
    return None if size == layers.vocab_size else size


def _tap_layers(
    keys: HeadKeys, key: str, first: int, num_layers: int, num_target_layers: int | None
) -> tuple[int, ...]:
    """Returns the tapped layers, which are counted from `first`."""
    ids = keys.get(key)
    if ids is None and num_target_layers is None:
        raise ValueError(f"{key} is missing" + ("" if first else ", and so is num_target_layers"))
    if ids is None:
        return default_tap_layers(num_layers, num_target_layers or 0)
    return layer_ids(key, ids, first)


def _flag(keys: HeadKeys, spellings: tuple[str, ...]) -> bool | None:
    """Returns the value of a flag in any of its spellings; None if there is none."""
    return agreed(
        {
            f"{where}{key}": Fields(values).flag(key)
            for where, values in keys.tables
            for key in spellings
            if keys.get(key) is not None and values.get(key) is not None
        }
    )


BLOCK = BlockFormat()
load_head, save_head, read_config = BLOCK.load, BLOCK.save, BLOCK.read_config
check_fits, require_fit, write_config, parse_config = BLOCK.misfits, BLOCK.require_fit, BLOCK.write_config, BLOCK.parse
