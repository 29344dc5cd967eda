"""Exports models to other engines: targets as Hugging Face folders, heads as chain drafters.

The drafters are for stock vLLM, SGLang and the speculators library.
Each engine has its own config keys and silently uses a default for a missing one; the only symptom is a lower
acceptance rate. So the written config is parsed by the engine's rules and compared with the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from jetspec.files import whole_folder
from jetspec.models.block_conv import BlockConv, ConvConfig
from jetspec.models.decoder import DecoderConfig, filled, on_meta
from jetspec.models.draft_head import DraftHead, HeadConfig
from jetspec.models.families import config_from_hf, pieces, rope_from_hf
from jetspec.models.head_folder import (
    OWN_FILES,
    architectures,
    layer_fields,
    published_tensors,
    raw_config,
    table,
    write_folder,
)
from jetspec.models.head_format import KINDS, parse_config, save_head, write_config
from jetspec.models.heads import format_of
from jetspec.models.hub import local_file
from jetspec.models.tensor_files import CONFIG_FILE, WEIGHTS_FILE, read_json, write_json, write_tensors
from jetspec.models.tokenizer import TOKENIZER_FILES
from jetspec.models.weights import Target

Engine = Literal["vllm", "sglang", "speculators"]
ChainKind = Literal["dflash", "dspark", "dflash2"]
NAMED: dict[ChainKind, str] = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
"""Architectures in that library's config."""
PICKLES = "pytorch_model*.bin"
GENERATION_FILE = "generation_config.json"
TARGET_FILES = (CONFIG_FILE, WEIGHTS_FILE, GENERATION_FILE, *TOKENIZER_FILES)


def export_head(
    head: DraftHead, folder: str | Path, engine: Engine | None, dtype: torch.dtype, target: str | None = None
) -> None:
    """Writes a head in an engine's layout, or in the published one (None). `target` is the name of its model.

    The edge term is left out where the engine has none of its form; see `chain_kind`.
    """
    folder = Path(folder)
    if engine is None:
        save_head(head, folder, dtype)
        return
    if problems := refusals(head.head_config, engine, target):
        raise ValueError(f"{engine} cannot run this head: {'; '.join(problems)}")
    kind = chain_kind(head.head_config, engine)
    chain = chain_head(head, kind)
    config = write_chain_config(chain.head_config, engine, dtype, target)
    check_export(config, engine, chain.head_config)
    write_folder(folder, config, published_tensors(chain, KINDS[NAMED[kind]], dtype), None)


def convert_pickles(source: Path, folder: str | Path, dtype: torch.dtype) -> None:
    """Writes a head whose weights are pickles as safetensors, with the same config. Nothing in a pickle is run."""
    tensors: dict[str, Tensor] = {}
    paths = sorted(source.glob(PICKLES))
    if not paths:
        raise ValueError(f"{source}: holds neither {WEIGHTS_FILE} nor {PICKLES}")
    for path in paths:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch and pickle raise many classes without a common base
            raise ValueError(f"{path}: is damaged, or holds more than tensors; nothing in it was run") from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError(f"{path}: is not a table of tensors")
        tensors |= {
            str(name): value.to(dtype if value.is_floating_point() else value.dtype, copy=True).contiguous()
            for name, value in found.items()
        }
    raw = raw_config(source)
    with whole_folder(Path(folder), OWN_FILES) as fresh:
        write_json(fresh / CONFIG_FILE, raw)
        write_tensors(tensors, fresh / WEIGHTS_FILE)
        format = format_of(fresh)
        try:
            format.read(fresh, format.read_config(fresh))
        except ValueError as error:
            raise ValueError(str(error).replace(str(fresh), str(source))) from error


def chain_kind(config: HeadConfig, engine: Engine) -> ChainKind:
    """Returns the kind as which an engine drafts its best chain of a head: with the edge term, where it has one of that
    form."""
    edge = config.edge
    if edge is not None and not config.causal and not config.causal_windows:
        if not edge.gate and (config.shifted or engine == "speculators"):
            return "dspark"
        if edge.gate and edge.gate_bias == 0 and not config.shifted:
            return "dflash2"
    return "dflash"


def chain_head(head: DraftHead, kind: ChainKind) -> DraftHead:
    """Returns a head as an engine runs it; most weights are shared."""
    config, state, edge = head.head_config, head.state_dict(), head.head_config.edge
    if edge is None:
        return head
    if kind == "dflash":
        config = replace(config, edge=None)
        state = {name: value for name, value in state.items() if not name.startswith("edge.")}
    elif kind == "dspark":
        state["edge.successor"] = state["edge.successor"] * edge.gate_bias
        config = replace(config, edge=replace(edge, gate_bias=1.0))
    else:
        config = replace(config, edge=replace(edge, candidates=edge.candidates or 16))
    if kind == "dflash2" and config.conv is None:  # without effect until it is trained
        config = replace(config, conv=ConvConfig(group=math.gcd(ConvConfig.group, config.layers.hidden_size)))
        made = DraftHead(config)
        for module in made.modules():
            if isinstance(module, BlockConv):
                module.reset()
        state = {name: value for name, value in made.state_dict().items() if "_conv." in name} | state
    return filled(on_meta(DraftHead, config), state, head.norm.weight.device)


def refusals(config: HeadConfig, engine: Engine, target: str | None) -> list[str]:
    """Returns the reasons why an engine cannot run a head."""
    kind, is_speculators = chain_kind(config, engine), engine == "speculators"
    has_own_taps = config.fused_taps or config.last_tap
    windows = any(config.layers.windows)
    problems = {
        "its slots predict the next position": config.shifted and kind != "dspark",
        "it has terms or convolutions that cannot be left out": config.path or (config.conv and kind != "dflash2"),
        "it has a reduced vocabulary, or taps of its own form": config.draft_vocab_size or has_own_taps,
        "it scales embeddings or logits": (config.embedding_scale, config.output_scale, config.softcap) != (1, 1, None),
        "it adapts the size of the target's states": config.target_hidden_size is not None,
        "it has windows, which stay at the anchor of a block in speculators": is_speculators and windows,
        "it has windows, which DSpark's layout makes causal": kind == "dspark" and windows and not is_speculators,
        "it is causal, and speculators lets slots attend to later ones": is_speculators and config.causal,
        "the format names the target; give --target": is_speculators and target is None,
    }
    return [words for words, holds in problems.items() if holds]


def write_chain_config(config: HeadConfig, engine: Engine, dtype: torch.dtype, target: str | None) -> dict[str, Any]:
    """Returns the contents of config.json, with rotary keys in the old and the new spelling."""
    raw = write_config(replace(config, edge=None, conv=None), dtype)
    del raw["auto_map"]  # it names code that is not part of the folder
    rope = {"rope_type": "default", **(raw["rope_scaling"] or {}), "rope_theta": raw["rope_theta"]}
    raw["rope_parameters"] = rope
    own = _term_keys(config)
    if engine == "speculators":
        return _speculators(raw, config, target) | own
    if config.edge is None:
        return raw
    if config.conv is not None:
        raw["dflash_config"] |= own
        return raw | {"architectures": ["DFlash2DraftModel"]}
    draft = {key: raw["dflash_config"][key] for key in ("target_layer_ids", "mask_token_id")}
    flags = ("dflash_config", "is_causal")
    layers = {key: value for key, value in raw.items() if key not in flags}
    return layers | draft | own | {"architectures": ["Qwen3DSparkModel"]}


def _term_keys(config: HeadConfig) -> dict[str, Any]:
    """Returns the keys of the terms that a head has beside its backbone."""
    if config.edge is None:
        return {}
    if config.conv is None:
        markov = {"markov_rank": config.edge.rank, "markov_head_type": "vanilla"}
        return {**markov, "enable_confidence_head": False, "confidence_head_with_markov": False}
    selector = {"selector_rank": config.edge.rank, "selector_top_k": config.edge.candidates}
    return {**selector, "conv_kernel_size": config.conv.taps, "conv_group_size": config.conv.group}


def _speculators(raw: dict[str, Any], config: HeadConfig, target: str | None) -> dict[str, Any]:
    """Nests the layers in a table of their own; layer ids count the embedding as layer 0."""
    own = ("architectures", "dflash_config", "block_size", "num_target_layers", "dtype", "is_causal")
    layers = {key: value for key, value in raw.items() if key not in own}
    path = local_file(target, CONFIG_FILE) if target else None
    found = architectures(read_json(path)) if path else set()
    kind = "dflash" if config.edge is None else "dspark" if config.conv is None else "dflash2"
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.depth}
    return {
        "architectures": [SPECULATORS[kind]],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": sorted(found)},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.layers.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.tap_layers],
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": config.shifted,
        "dtype": raw["dtype"],
    }


def properties(config: HeadConfig) -> dict[str, Any]:
    """Returns the properties of a head that an engine could misread in a config.json without an error."""
    c = config.layers
    return {
        "causal": list(config.causal_layers),
        "tap_layers": list(config.tap_layers),
        "windows": [c.window(i) for i in range(c.num_layers)],
        "mask_token": config.mask_token,
        "depth": config.depth,
        "rope": c.rope,
    }


def check_export(raw: Mapping[str, Any], engine: Engine, config: HeadConfig) -> None:
    """Raise ValueError if the engine would read other properties from a config.json than the head has."""
    expected = properties(config)
    if engine == "speculators" or config.edge is not None:
        again = parse_config(raw)
        if again != replace(config, num_target_layers=again.num_target_layers):
            raise ValueError("this head would not be read back as it is")
    for reader, read in READERS[engine].items():
        found = read(raw)
        if wrong := [name for name in expected if found[name] != expected[name]]:
            raise ValueError(f"{reader} would misread {', '.join(wrong)} of this head")


def read_vllm(raw: Mapping[str, Any], has_is_causal: bool = True) -> dict[str, Any]:
    """vLLM: `is_causal` if it supports the key, then `dflash_config.causal`, else layers with a window are causal."""
    own, kinds = {**raw, **table(raw, "dflash_config")}, raw.get("layer_types")
    flags = [raw.get("is_causal") if has_is_causal else None, own.get("causal")]
    flag = next((value for value in flags if value is not None), None)
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [False] * raw["num_hidden_layers"]
    # It adds 1 to these ids and taps the input of that layer, unless ids of inputs are given.
    taps = [i - 1 for i in raw.get("eagle_aux_hidden_state_layer_ids", [i + 1 for i in own["target_layer_ids"]])]
    return {
        "causal": [bool(w if flag is None else flag) for w in windowed],
        "tap_layers": taps,
        "windows": [raw["sliding_window"] if w else None for w in windowed],
        "mask_token": own["mask_token_id"],
        "depth": raw["block_size"] - (not raw.get("sample_from_anchor", "Qwen3DSparkModel" in architectures(raw))),
        "rope": rope_from_hf(raw),
    }


def read_sglang(raw: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang: only `is_causal`, and only beside `layer_types`; else layers with a window are causal."""
    flag = raw.get("is_causal") if raw.get("layer_types") else False
    return read_vllm({**raw, "is_causal": flag, "dflash_config": {**table(raw, "dflash_config"), "causal": None}})


def read_speculators(raw: Mapping[str, Any], has_is_causal: bool = True) -> dict[str, Any]:
    """vLLM on the speculators layout, which it converts to its own."""
    ids = raw["aux_hidden_state_layer_ids"]
    own = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in ids],
        "causal": not raw.get("sliding_window_non_causal", True),
    }
    outer = {key: raw[key] for key in ("block_size", "sample_from_anchor")}
    layers = {**raw["transformer_layer_config"], **outer, "dflash_config": own}
    return read_vllm({**layers, "eagle_aux_hidden_state_layer_ids": ids}, has_is_causal)


READERS: dict[Engine, dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "vllm": {"vLLM 0.32": read_vllm, "vLLM 0.26": partial(read_vllm, has_is_causal=False)},
    "sglang": {"SGLang": read_sglang},
    "speculators": {"vLLM 0.32": read_speculators, "vLLM 0.26": partial(read_speculators, has_is_causal=False)},
}
"""Parsers of each format, by the program."""


def save_target(target: Target, folder: str | Path, dtype: torch.dtype) -> None:
    """Writes a target, dequantised, to a folder that appears complete or not at all."""
    config = write_target_config(target.decoder.config, dtype)
    ends: dict[str, Any] = {"eos_token_id": sorted(target.eos_tokens)}
    if target.tokenizer.bos_token is not None:
        ends["bos_token_id"] = target.tokenizer.bos_token
    tensors = {
        stored: part.detach().to("cpu", dtype).contiguous()
        for name, value in target.decoder.named_parameters()
        for stored, part in pieces(target.decoder.config, name, value, "hf")
    }
    with whole_folder(Path(folder), TARGET_FILES) as fresh:
        write_json(fresh / CONFIG_FILE, {**config, **ends})
        write_json(fresh / GENERATION_FILE, ends)
        target.tokenizer.save(fresh)
        write_tensors(tensors, fresh / WEIGHTS_FILE)


def write_target_config(c: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the contents of config.json; ValueError if they would not be read as the same model."""
    out = {
        "architectures": [c.family.title().replace("_", "") + "ForCausalLM"],
        "model_type": c.family,
        **layer_fields(c, dtype),
        "tie_word_embeddings": c.tied_embedding,
        "mlp_bias": c.mlp_bias,
    }
    window = next((window for window in c.windows if window is not None), None)
    if c.family == "mistral":
        out["sliding_window"] = window
    elif c.family.startswith("qwen") and window is not None:
        kinds = ["sliding_attention" if c.window(i) else "full_attention" for i in range(c.num_layers)]
        out |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if c.moe is not None:
        out |= {
            "num_experts": c.moe.num_experts,
            "num_experts_per_tok": c.moe.num_chosen,
            "moe_intermediate_size": c.moe.inner_size,
            "norm_topk_prob": c.moe.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(c.num_layers) if i not in c.moe_layers],
        }
    if (read := config_from_hf(out)) != c:
        wrong = [name for name in vars(c) if getattr(read, name) != getattr(c, name)]
        raise ValueError(f"a Hugging Face config of family {c.family} cannot express its {', '.join(wrong)}")
    return out
