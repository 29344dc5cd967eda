"""Heads for other engines: chain drafters that stock vLLM, SGLang and the speculators library load.

Each engine knows its own keys for the same facts, and takes a fact that it does not find for another one without a
word: all that shows is a lower acceptance. So what was written is read back by the engine's rules, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from jetspec.models.decoder import RopeConfig
from jetspec.models.draft_head import DraftHead, HeadConfig
from jetspec.models.families import rope_from_hf
from jetspec.models.head_folder import (
    CONFIG_FILE,
    HeadTensors,
    architectures,
    published_tensors,
    raw_config,
    table,
    write_folder,
)
from jetspec.models.head_format import NAMES, save_head, write_config
from jetspec.models.hub import local_file
from jetspec.models.weights import read_json

Engine = Literal["vllm", "sglang", "speculators"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


def export_head(
    head: DraftHead, folder: str | Path, engine: Engine | None, dtype: torch.dtype, target: str | None = None
) -> None:
    """Write a head as an engine wants it; None: as it is published. `target` is the name of the model it serves.

    No other engine knows the edge term, which stays behind: the chain is then that of the plain head.
    """
    folder = Path(folder)
    if engine is None:
        save_head(head, folder, dtype)
        return
    if problems := refusals(head.head_config, engine, target):
        raise ValueError(f"{engine} cannot run this head: {'; '.join(problems)}")
    chain = without_edge(head)
    config = write_chain_config(chain.head_config, engine, dtype, target)
    write_folder(folder, config, published_tensors(chain, NAMES, dtype), None)
    check_export(folder, engine, chain, dtype)


def refusals(config: HeadConfig, engine: Engine, target: str | None) -> list[str]:
    """Why an engine cannot run a head, in plain words."""
    problems = []
    if config.shifted:
        problems.append("its slots predict the position behind them")
    if config.target_hidden_size is not None:
        problems.append("it adapts the size of the target's states")
    if engine == "speculators":
        if config.causal_windows:
            problems.append("its layers differ in what they see of a block")
        if target is None:
            problems.append("the format names the target; give --target")
    return problems


def without_edge(head: DraftHead) -> DraftHead:
    """The same head with the same weights, less the edge term."""
    if head.edge is None:
        return head
    with torch.device("meta"):
        plain = DraftHead(replace(head.head_config, edge=None))
    state = {name: value for name, value in head.state_dict().items() if not name.startswith("edge.")}
    plain.load_state_dict(state, assign=True)
    return plain.requires_grad_(False).eval()


def write_chain_config(config: HeadConfig, engine: Engine, dtype: torch.dtype, target: str | None) -> dict[str, Any]:
    """The contents of config.json. Rotary keys are written in the old and in the new spelling."""
    raw = write_config(config, dtype)
    del raw["auto_map"]  # names a program that is not part of the folder
    rope = {"rope_type": "default", **(raw["rope_scaling"] or {}), "rope_theta": raw["rope_theta"]}
    raw["rope_parameters"] = rope
    return _speculators(raw, config, target) if engine == "speculators" else raw


def _speculators(raw: dict[str, Any], config: HeadConfig, target: str | None) -> dict[str, Any]:
    """The layers in a table of their own, and layer ids that count the embedding as layer 0."""
    own = ("architectures", "dflash_config", "block_size", "num_target_layers", "dtype")
    layers = {key: value for key, value in raw.items() if key not in own}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.depth}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": sorted(_architectures(target))},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.layers.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.tap_layers],
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": False,
        "dtype": raw["dtype"],
    }


def _architectures(target: str | None) -> set[str]:
    """Those that the target's own config.json names, if it is on this machine."""
    path = local_file(target, CONFIG_FILE) if target else None
    return architectures(read_json(path)) if path else set()


@dataclass(frozen=True)
class Reading:
    """What an engine makes of a config.json: all that it could get wrong without an error."""

    causal: tuple[bool, ...]
    """Per layer of the head."""
    tap_layers: tuple[int, ...]
    """Outputs of the target's layers, counted from 0."""
    windows: tuple[int | None, ...]
    mask_token: int
    depth: int
    rope: RopeConfig

    @classmethod
    def wanted(cls, config: HeadConfig) -> Reading:
        c = config.layers
        windows = tuple(c.window(i) for i in range(c.num_layers))
        return cls(config.causal_layers, config.tap_layers, windows, config.mask_token, config.depth, c.rope)


def check_export(folder: Path, engine: Engine, head: DraftHead, dtype: torch.dtype) -> None:
    """Read a folder as its engine does: the same facts, and the same numbers, as the head has."""
    raw, wanted = raw_config(folder), Reading.wanted(head.head_config)
    for reader, read in READERS[engine].items():
        if (found := read(raw)) != wanted:
            wrong = [name for name in vars(wanted) if getattr(found, name) != getattr(wanted, name)]
            raise ValueError(f"{folder}: {reader} would misread {', '.join(wrong)} of this head")
    tensors = HeadTensors(folder, NAMES)
    tensors.check(head)
    for name, value in published_tensors(head, NAMES, dtype).items():
        if not torch.equal(tensors.tensor(name), value):
            raise ValueError(f"{folder}: tensor {name} was not stored as it is")


def read_vllm(raw: Mapping[str, Any], knows_is_causal: bool = True) -> Reading:
    """vLLM: `is_causal` if it knows the key, then `dflash_config.causal`, then windowed layers are the causal ones."""
    own, kinds = table(raw, "dflash_config"), raw.get("layer_types")
    said = [raw.get("is_causal") if knows_is_causal else None, own.get("causal")]
    flag = next((value for value in said if value is not None), None)
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [False] * raw["num_hidden_layers"]
    # It adds 1 to these ids and takes the input of that layer, unless ids of inputs are given as such.
    taps = [i - 1 for i in raw.get("eagle_aux_hidden_state_layer_ids", [i + 1 for i in own["target_layer_ids"]])]
    return Reading(
        causal=tuple(bool(w if flag is None else flag) for w in windowed),
        tap_layers=tuple(taps),
        windows=tuple(raw["sliding_window"] if w else None for w in windowed),
        mask_token=own["mask_token_id"],
        depth=raw["block_size"] - 1,
        rope=rope_from_hf(raw),
    )


def read_sglang(raw: Mapping[str, Any]) -> Reading:
    """SGLang: only `is_causal`, and only beside `layer_types`; without it, windowed layers are the causal ones."""
    flag = raw.get("is_causal") if raw.get("layer_types") else False
    return read_vllm({**raw, "is_causal": flag, "dflash_config": {**table(raw, "dflash_config"), "causal": None}})


def read_speculators(raw: Mapping[str, Any], knows_is_causal: bool = True) -> Reading:
    """vLLM on the speculators layout, which it translates into its own."""
    ids = raw["aux_hidden_state_layer_ids"]
    own = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in ids],
        "causal": not raw.get("sliding_window_non_causal", True),
    }
    layers = {**raw["transformer_layer_config"], "block_size": raw["block_size"], "dflash_config": own}
    return read_vllm({**layers, "eagle_aux_hidden_state_layer_ids": ids}, knows_is_causal)


def _before(read: Callable[[Mapping[str, Any], bool], Reading]) -> Callable[[Mapping[str, Any]], Reading]:
    return lambda raw: read(raw, False)


READERS: dict[Engine, dict[str, Callable[[Mapping[str, Any]], Reading]]] = {
    "vllm": {"vLLM 0.32": read_vllm, "vLLM 0.26": _before(read_vllm)},
    "sglang": {"SGLang": read_sglang},
    "speculators": {"vLLM 0.32": read_speculators, "vLLM 0.26": _before(read_speculators)},
}
"""By the names of the programs that read a format."""
