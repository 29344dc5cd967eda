"""Reads and writes EAGLE-3 heads in the published layout; reads that of the speculators library, and P-EAGLE heads.

Layer numbers: `eagle_config.eagle_aux_hidden_state_layer_ids` counts layers by their outputs, as we do. The top-level
key of that name, and speculators, count the embedding as 0, so every number is one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.config import EAGLE3_DEPTH, MAX_DEPTH
from jetspec.models.decoder import DecoderConfig
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head, EagleHead, eagle3_tap_layers
from jetspec.models.families import MAX_LAYERS, Fields
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
from jetspec.models.peagle import PEagleConfig, PEagleHead
from jetspec.models.tensor_files import errors_name

ARCHITECTURE = "LlamaForCausalLMEagle3"
EMBEDDING = "embed_tokens.weight"
MAX_TAPS = 16
PARALLEL = ("P-EAGLE", "speculators (peagle)")
PEAGLE_DEPTH = 8
"""Tokens of a pass for which the trainers of P-EAGLE train by default."""
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
TAPS = "eagle_aux_hidden_state_layer_ids"
NAMES = Names(
    own={
        "fc.weight": "fc.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.*.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "input_norm.weight": "input_norm.weight",
        "fc_norm": "fc_norm.*.weight",
        "mask_hidden": "mask_hidden",
    },
    # The last two are copies of the target's, which speculators keeps for training.
    ignored=frozenset({"d2t", "t2d", EMBEDDING, "verifier_norm.weight", "verifier_lm_head.weight"}),
    layer="midlayer.",
)


def make_head(config: Eagle3Config) -> EagleHead:
    """Returns a head without weights."""
    return PEagleHead(config) if isinstance(config, PEagleConfig) else Eagle3Head(config)


class Eagle3Format(HeadFormat[Eagle3Config, EagleHead]):
    """The published EAGLE-3 layout; reads that of the speculators library and P-EAGLE heads too."""

    kinds = ("EAGLE-3", "speculators (eagle3)", *PARALLEL)
    make = staticmethod(make_head)
    names = NAMES

    def num_drafted(self, config: Eagle3Config) -> int:
        return config.draft_vocab_size

    def read_config(self, folder: Path) -> Eagle3Config:
        """Reads the config of a head's folder and checks every value.

        `tap_layers` is empty if the files name neither them nor the number of target layers; see `for_target`.
        """
        config = super().read_config(folder)
        with errors_name(folder):
            return replace(config, own_embedding=EMBEDDING in HeadTensors(folder, NAMES))

    def parse(self, raw: Mapping[str, Any]) -> Eagle3Config:
        is_speculators, is_parallel = "speculators_model_type" in raw, kind_of_config(raw) in PARALLEL
        inner = HeadKeys(("transformer_layer_config.", table(raw, "transformer_layer_config")))
        keys, own = HeadKeys(("", raw)), HeadKeys(("eagle_config.", table(raw, "eagle_config")))
        layers = _layer_config(inner if is_speculators else keys)
        if layers.num_layers > 1 and not is_parallel:
            raise ValueError(f"num_hidden_layers is {layers.num_layers}; EAGLE-3 heads have one layer here")
        target_hidden_size = keys.size("target_hidden_size", layers.hidden_size)
        num_target_layers = keys.integer("num_target_layers", 0, MAX_LAYERS, 0) or None
        default_vocab = 32_000 if is_speculators else layers.vocab_size
        places = {} if is_parallel else {"ttt_length": keys, "eagle_config.ttt_length": own}
        depths = {name: p.integer("ttt_length", 1, MAX_DEPTH) for name, p in places.items() if "ttt_length" in p}
        make = partial(PEagleConfig, mask_token=_mask_token(keys, layers)) if is_parallel else Eagle3Config
        config = make(
            layers=layers,
            tap_layers=_tap_layers(keys, own) or (eagle3_tap_layers(num_target_layers) if num_target_layers else ()),
            draft_vocab_size=keys.integer("draft_vocab_size", 1, layers.vocab_size, default_vocab),
            depth=_num_depths(raw) if is_parallel else agreed(depths) or EAGLE3_DEPTH,
            target_hidden_size=None if target_hidden_size == layers.hidden_size else target_hidden_size,
            num_target_layers=num_target_layers,
            norm_before_residual=keys.flag("norm_before_residual"),
            norm_taps=keys.flag("norm_before_fc"),
            norm_each_tap=keys.flag("fc_norm"),
            norm_output=keys.flag("norm_output") and not is_parallel,  # P-EAGLE has no next step
            last_tap=read_last_tap(keys),
        )
        if not all(each.flag("use_aux_hidden_state", True) for each in (keys, own)):
            raise ValueError("use_aux_hidden_state false is not supported")
        refuse_unread(keys, own, inner)
        return config

    def write_config(self, config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the contents of config.json, with the tapped layers under both keys that other readers know."""
        if isinstance(config, PEagleConfig):
            raise ValueError("P-EAGLE heads are not written")
        c = config.layers
        assert c.qkv_bias == c.out_bias and c.moe is None and not any(c.windows)
        own = {TAPS: list(config.tap_layers), "use_aux_hidden_state": True, "ttt_length": config.depth}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": c.family,
            **layer_fields(c, dtype),
            "mlp_bias": c.mlp_bias,
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_taps,
            "fc_norm": config.norm_each_tap,
            "norm_output": config.norm_output,
            "num_target_layers": config.num_target_layers,
            "eagle_config": own,
            TAPS: [layer + 1 for layer in config.tap_layers],
            **tap_fields(config),
        }

    def facts(self, config: Eagle3Config, kind: str) -> dict[str, Any]:
        return {
            "format": ("P-EAGLE" if kind in PARALLEL else "EAGLE-3")
            + (" (speculators)" if "speculators" in kind else ""),
            "layout": "all levels in one pass" if kind in PARALLEL else "one level per pass",
            "tap_layers": list(config.tap_layers) or "as the target decides",
            "draft_vocab_size": config.draft_vocab_size,
            "own_embedding": config.own_embedding,
        }

    def for_target(self, config: Eagle3Config, target: DecoderConfig) -> Eagle3Config:
        """Adds the default tap layers, if the head's files name none."""
        config = super().for_target(config, target)
        return config if config.tap_layers else replace(config, tap_layers=eagle3_tap_layers(target.num_layers))

    def misfits(self, head: Eagle3Config, target: TargetShape) -> list[str]:
        problems, size = super().misfits(head, target), head.layers.hidden_size
        if size != target.hidden_size and not head.own_embedding:
            problems.append(f"its hidden size is {size}, and it has no embedding of that size")
        return problems

    def buffers(self, config: Eagle3Config, tensors: HeadTensors, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        read = {"token_of": read_vocabulary(tensors, config.draft_vocab_size, config.layers.vocab_size)}
        if config.own_embedding:
            shape = (config.layers.vocab_size, config.layers.hidden_size)
            read["embedding"] = tensors.exactly(EMBEDDING, shape).to(state["fc.weight"].dtype)
        return read

    def buffer_tensors(self, head: EagleHead, dtype: torch.dtype) -> dict[str, Tensor]:
        token = head.token_of.cpu()
        flags = torch.zeros(head.config.vocab_size, dtype=torch.bool).scatter_(0, token, True)
        tensors = {"d2t": token - torch.arange(len(token)), "t2d": flags}
        if head.embedding is not None:
            tensors[EMBEDDING] = head.embedding.to("cpu", torch.bfloat16 if dtype == torch.int8 else dtype, copy=True)
        return tensors


def _layer_config(keys: HeadKeys) -> DecoderConfig:
    layers = replace(keys.layers({"model_type": keys.get("model_type", "llama")}), tied_embedding=False)
    if keys.integer("draft_num_hidden_layers", 1, MAX_LAYERS, layers.num_layers) != layers.num_layers:
        raise ValueError("draft_num_hidden_layers differs from num_hidden_layers")
    full = ["full_attention"] * layers.num_layers
    if layers.moe is not None or any(layers.windows) or keys.get("layer_types", full) != full:
        raise ValueError("EAGLE-3 heads with experts or sliding windows (layer_types) are not supported")
    return layers


def _mask_token(keys: HeadKeys, layers: DecoderConfig) -> int:
    """Returns the token of masked slots of a P-EAGLE head."""
    found = {key: keys.integer(key, 0, layers.vocab_size - 1) for key in MASK_TOKENS if key in keys}
    if (token := agreed(found)) is None:
        raise ValueError(f"{MASK_TOKENS[0]} is missing")
    return token


def _num_depths(raw: Mapping[str, Any]) -> int:
    """Returns the number of tokens of a pass for which a P-EAGLE head was trained."""
    methods = table(raw, "speculators_config").get("proposal_methods")
    own = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    return Fields(own).integer("speculative_tokens", 1, MAX_DEPTH, PEAGLE_DEPTH)


def _tap_layers(keys: HeadKeys, own: HeadKeys) -> tuple[int, ...]:
    """Returns the tapped layers under any of the keys, counted by outputs; empty if there are none."""
    places = {
        TAPS: (keys, 1),
        "aux_hidden_state_layer_ids": (keys, 1),
        f"eagle_config.{TAPS}": (own, 0),
        "target_layer_ids": (keys, 0),
    }
    found = {}
    for key, (section, first) in places.items():
        if (ids := section.get(key.rpartition(".")[2])) is not None:
            found[key] = layer_ids(key, ids, first, MAX_TAPS)
    return agreed(found) or ()


EAGLE3 = Eagle3Format()
