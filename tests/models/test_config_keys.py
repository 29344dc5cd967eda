"""Every key of a head's config changes what the head computes, is refused by its name, or is known to be harmless."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from jetspec.models.decoder import RopeConfig
from jetspec.models.draft_head import DraftHead, HeadConfig
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.head_folder import HARMLESS
from jetspec.models.head_format import CAUSAL, SHIFTED, save_head
from jetspec.models.heads import load_any_head
from jetspec.models.peagle import PEagleHead
from tests.models import test_eagle3_format as eagle3
from tests.models.head_paged import HEADS, LAYERS, Embedder, random_head
from tests.models.peers import Peer, edit_config, to_authors_layout, to_specforge
from tests.models.test_published_heads import LAYERS as WINDOWS
from tests.models.test_published_heads import TEXT, assert_equal_block, draft_along, write_dfly, write_domino

TARGET = replace(LAYERS, family="llama", num_layers=6, rope=RopeConfig(), qk_norm=False)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64},
    "llama3": {"low_freq_factor": 1.5, "high_freq_factor": 8.0, "original_max_position_embeddings": 256, "factor": 8.0},
    "yarn": {"beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 512, "factor": 4.0},
    "yarn stretched": {"attention_factor": 1.25, "original_max_position_embeddings": 512, "factor": 4.0},
    "yarn scaled": {"mscale": 0.7, "mscale_all_dim": 0.4, "original_max_position_embeddings": 512, "factor": 4.0},
}
SELECTOR = {"selector_rank": 6, "selector_top_k": 7, "conv_group_size": 4, "conv_kernel_size": 2}
SPECFORGE = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
MARKOV = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}


def write_peer(folder: Path, kind: str = "dflash", **settings: Any) -> None:
    Peer.make(kind, **settings).save(folder)


def write_authors(folder: Path, architecture: str, own_table: bool, kind: str, **own: Any) -> None:
    settings = {key: value for key, value in own.items() if key not in SPECFORGE}
    Peer.make(kind, layers=WINDOWS["windowed"], **settings).save(folder)
    to_authors_layout(folder, architecture, own_table, **own)


def write_rope(folder: Path, key: str, name: str) -> None:
    write_authors(folder, "DFlashDraftModel", True, "dflash")
    rope = {"rope_type": name.split()[0], **ROPES[name]}
    theta = {"rope_theta": 1000.0}
    old = {"rope_scaling": rope, **theta, "rope_parameters": None}
    edit_config(folder, **(old if key == "rope_scaling" else {"rope_parameters": rope | theta}))


def write_windows_by_number(folder: Path) -> None:
    write_authors(folder, "DFlashDraftModel", True, "dflash")
    edit_config(folder, layer_types=None, max_window_layers=1)


def write_eagle3(folder: Path, is_nested: bool = False) -> None:
    EAGLE3.save(eagle3.random_eagle3(eagle3.PLAIN), folder, torch.float32)
    if is_nested:
        eagle3.to_speculators(folder)


def write_peagle(folder: Path, is_nested: bool = False) -> None:
    sizes = {"num_hidden_layers": 2}
    Peer.make("peagle", layers=sizes, family="llama", taps=(0, 1, 2), norm_before_residual=True).save(folder)
    if not is_nested:
        to_specforge(folder)


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "JetSpec": lambda folder: save_head(random_head(HEADS["edge"]), folder, torch.float32),
    "JetSpec windowed": lambda folder: save_head(random_head(HEADS["windowed_mixed"]), folder, torch.float32),
    "DFlash": lambda folder: write_authors(folder, "DFlashDraftModel", True, "dflash"),
    "DFlash2": lambda folder: write_authors(folder, "DFlash2DraftModel", True, "dflash2", **SELECTOR),
    "DSpark": lambda folder: write_authors(folder, "Qwen3DSparkModel", False, "dspark", **MARKOV),
    "SpecForge": lambda folder: write_authors(
        folder, "DSparkDraftModel", True, "dspark", markov_head_type="gated", **SPECFORGE, **MARKOV
    ),
    "Domino": write_domino,
    "DFly": write_dfly,
    "speculators DFlash": lambda folder: write_peer(folder, layers=WINDOWS["windowed"]),
    "speculators DSpark": lambda folder: write_peer(folder, "dspark", markov_head_type="rnn", **MARKOV),
    "speculators DFlash2": lambda folder: write_peer(folder, "dflash2", **SELECTOR),
    "speculators XPress": lambda folder: write_peer(folder, "xpress", xpress_rank=6, sample_from_anchor=True),
    "EAGLE-3": write_eagle3,
    "DeepSpec EAGLE-3": eagle3.write_deepspec,
    "speculators EAGLE-3": lambda folder: write_eagle3(folder, is_nested=True),
    "P-EAGLE": write_peagle,
    "speculators P-EAGLE": lambda folder: write_peagle(folder, is_nested=True),
    "windows by number": write_windows_by_number,
    **{
        f"{key} {name}": partial(write_rope, key=key, name=name)
        for key in ("rope_parameters", "rope_scaling")
        for name in ROPES
    },
}
"""Writers of a folder per layout."""


@functools.cache
def files_of(layout: str) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        LAYOUTS[layout](Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_layout(layout: str, folder: Path) -> None:
    """Writes the folder of a layout, which is made once."""
    for name, content in files_of(layout).items():
        (folder / name).write_bytes(content)


ADDED: dict[str, Any] = {
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style", "use_aux_hidden_state"), False),
    **dict.fromkeys(("use_swa", "attention_sink_bias", "mask_embedding", "parallel_drafting", "mlp_bias"), True),
    **dict.fromkeys((*SHIFTED, *CAUSAL), True),
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "attention_bias"), True),
    **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov", "enable_hidden_correction"), True),
    **dict.fromkeys(("logit_scale", "output_multiplier", "partial_rotary_factor", "embedding_multiplier"), 0.5),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank"), 4),
    **dict.fromkeys(("emb_dim", "gru_hidden_dim", "xpress_rank", "xpress_mlp_ratio", "block_size"), 4),
    **dict.fromkeys(("swa_window_size", "hidden_correction_intermediate_size", "target_hidden_size"), 9),
    **dict.fromkeys(("pure_draft_prefix_len", "num_jacobi_passes", "ttt_length", "num_anchors"), 3),
    **{key: [1, 2] for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")},
    "final_logit_softcapping": 2.0,
    "input_embedding_scale": 2.0,
    "draft_vocab_size": 20,
    "num_target_layers": 5,
    "target_num_hidden_layers": 5,
    "model_arch": "dflare",
    "fusion_type": "gated_sum",
    "rope_theta": 77.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
    "layer_types": ["sliding_attention"] * 2,
    "quantization_config": {"quant_method": "fp8"},
    "text_config": {"hidden_size": 16},
    "markov_head_type": "rnn",
    "hidden_act": "gelu",
    "last_tap": "cooked",
    "projector_type": "domino",
    "an_unknown_key": 1,
}
"""Keys of any layout, and some that no reader knows: written where the folder does not have them."""
ROPE_ADDED = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1], "short_factor": [2.0], "truncate": False}
EDGE_ADDED = {"an_unknown_key": 1, "candidates": 5}
OTHER: dict[str, Any] = {
    "rms_norm_eps": 0.5,
    "mask_token_id": 3,
    "block_size": 4,
    "sliding_window": 6,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "rope_type": "yarn",
    "beta_fast": 3.0,
    "original_max_position_embeddings": 100,
    "rope_theta": 77.0,
    "head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
"""Other valid values, where one more or the opposite is not valid or has too small an effect."""
STORED = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "attention_bias", "mlp_bias", "num_target_layers", "target_num_hidden_layers"),
    *(
        "target_hidden_size",
        "emb_dim",
        "draft_vocab_size",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "markov_rank",
        "markov_head_type",
    ),
    *(
        "block_size",
        "xpress_rank",
        "xpress_mlp_ratio",
        "gru_hidden_dim",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ),
    *("enable_hidden_correction", "hidden_correction_intermediate_size", "rank", "gate", "norm_before_fc", "fc_norm"),
    *("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
}
"""Keys that tensors or the target contradict: the refusal names those."""
SELECTING = {
    *("rope_type", "architectures", "speculators_model_type", "model_type", "projector_type", "layer_types"),
    *("num_hidden_layers", "enable_hidden_correction", "selector_rank"),
}
"""Keys that decide which others are read: the refusal names one of those."""
ABSENT = object()
IS_STORED = re.compile("tensors? |layers, the target|the target's")
HARMLESS_TABLES = ("speculators_config", "auto_map")
COUNTS = {
    "sliding_window": "JetSpec windowed",
    "max_window_layers": "windows by number",
    "use_sliding_window": "windows by number",
    "sliding_window_non_causal": "speculators DFlash",
    "original_max_position_embeddings": "rope_parameters yarn",
    "confidence_head_with_markov": "DSpark",
    "markov_head_type": "DSpark",
    "norm_output": "EAGLE-3",
    "confidence_head_alpha": "none: enable_confidence_head decides",
}
"""A layout in which a key counts that is harmless in others."""


def other(key: str, value: Any) -> Any:
    if key in OTHER and value != OTHER[key]:
        return OTHER[key] if not isinstance(value, list) else OTHER[key][-len(value) :]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value[:-1], other(key, value[-1])]
    return f"{value}_another" if isinstance(value, str) else None


def changes(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the place and value of each change of a table and of those in it."""
    for key, value in raw.items():
        if isinstance(value, dict) and key != "auto_map":
            yield from changes(value, (*path, key))
        elif value is not None and (changed := other(key, value)) is not None:
            yield (*path, key), changed
    here = path[-1] if path else ""
    added = ROPE_ADDED if here.startswith("rope_") else EDGE_ADDED if here == "edge" else ADDED
    inner = raw.get("dflash_config") or {}
    for key, value in added.items() if here not in ("speculators_config", "verifier") else ():
        if raw.get(key) is None and key not in inner:
            yield (*path, key), value


def keys(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the place of each key of a table and of those in it."""
    for key, value in raw.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def edited(text: str, path: tuple[str, ...], value: Any) -> str:
    """Returns a config with another value at a place, or without a key there (ABSENT)."""
    raw = table = json.loads(text)
    for part in path[:-1]:
        table = table[part]
    table[path[-1]] = value
    if value is ABSENT:
        del table[path[-1]]
    return json.dumps(raw)


def taps_of(head: DraftHead | PEagleHead) -> Tensor:
    """Tapped states of a text."""
    return torch.randn(len(TEXT), head.head_config.tap_size, generator=torch.Generator().manual_seed(2))


def result(folder: Path, is_eagle3: bool) -> list[Tensor]:
    """Returns numbers that a head computes: taps, depth, states and log-probabilities."""
    head = load_any_head(folder, eagle3.TARGET if is_eagle3 else TARGET)
    numbers = [torch.tensor([*head.head_config.tap_layers, head.head_config.depth]).float()]
    if not isinstance(head, Eagle3Head):
        states, rows = draft_along(head, Embedder(), TEXT, taps_of(head), 12)
        return [*numbers, states, *rows]
    position, random = torch.arange(12)[None], torch.Generator().manual_seed(0)
    embedded, tap, drafted = (
        torch.randn(1, *shape, generator=random) for shape in ((12, 16), (12, head.head_config.tap_size), (2, 3, 16))
    )
    anchor_RA = torch.tensor([[4, 11]])
    visible = position[:, None] < anchor_RA[..., None]
    states = head.forward_unrolled(embedded, tap, position, anchor_RA, drafted, visible)
    return [*numbers, states, *(x.float() for x in head.best_tokens(states, 5))]


def is_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, atol=1e-5, rtol=0) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_key_counts_or_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    file, is_eagle3 = tmp_path / "config.json", "EAGLE-3" in name
    text = file.read_text()
    expected, head = result(tmp_path, is_eagle3), load_any_head(tmp_path).head_config
    flags = {}
    if isinstance(head, HeadConfig):
        flags = {**dict.fromkeys(SHIFTED, head.shifted), **dict.fromkeys(CAUSAL, head.causal)}
    wrong = []
    for path, value in changes(json.loads(text)):
        key = path[-1]
        if name.startswith("rope_") and path[0] != name.split()[0]:
            continue  # as in "DFlash"
        value = not flags[key] if key in flags else value
        file.write_text(edited(text, path, value))
        try:
            is_silent = is_same(result(tmp_path, is_eagle3), expected)
            is_allowed = COUNTS.get(key) != name if key in COUNTS else key in HARMLESS or path[0] in HARMLESS_TABLES
            if is_silent and not is_allowed:
                wrong.append(f"{'.'.join(path)} = {value}: the same numbers")
        except ValueError as error:
            words = str(error)
            is_known = key in words or key in SELECTING or (key in STORED and IS_STORED.search(words))
            if "\n" in words or not is_known:
                wrong.append(f"{'.'.join(path)} = {value}: {words}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("speculators") and "EAGLE-3" not in name])
def test_a_changed_or_absent_key_means_what_it_does_to_the_peer(name: str, tmp_path: Path) -> None:
    """A folder that both read is computed alike."""
    write_layout(name, tmp_path)
    file, kind, num_read = tmp_path / "config.json", name.split()[1].lower().replace("-", ""), 0
    text = file.read_text()
    for path, value in [*changes(json.loads(text)), *((path, ABSENT) for path in keys(json.loads(text)))]:
        file.write_text(edited(text, path, value))
        try:
            head = load_any_head(tmp_path)
            peer = Peer.load(kind, tmp_path)
        except (ValueError, RuntimeError, AssertionError, StrictDataclassError):  # one of them refuses
            continue
        num_read += 1
        assert not isinstance(head, Eagle3Head)
        assert_equal_block(peer, head, TEXT, taps_of(head), 12)
    assert num_read > 30
