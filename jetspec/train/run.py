"""Makes a trainer from a recipe: reads the data, makes or loads the head, checks that both fit the target."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from jetspec.config import EAGLE3_DEPTH
from jetspec.data.corpus import Documents, PackedData, Tally, read_documents
from jetspec.files import write_whole
from jetspec.models.block_conv import ConvConfig
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head, eagle3_tap_layers
from jetspec.models.head_format import BLOCK
from jetspec.models.heads import Head, load_any_head
from jetspec.record import shown
from jetspec.train.config import BLOCK_ONLY, EAGLE3_ONLY, HeadShape, TrainConfig
from jetspec.train.trainer import Score, Trainer

DRAFT_VOCAB = 32_000
"""Default size of an EAGLE-3 draft vocabulary."""
ROWS_FILE = "rows_cut_or_left_out.txt"
"""Name of the file that lists cut and omitted rows of the data."""


def make_trainer(
    config: TrainConfig, target: Decoder, score: Score | None = None, listed: Path | None = None
) -> Trainer:
    """A trainer with its head and data."""
    head = start_head(config, target)
    documents = read_data(config, target.config.vocab_size, head, listed)
    validation = None
    if config.validation_rows:
        held_out, documents = documents.hold_out(config.validation_rows * 4, config.seed)
        packed = PackedData(held_out, config.row_len, config.seed)
        validation = packed.batch(0, min(config.validation_rows, packed.rows_per_pass))
    times = np.array([file.times for file in config.files])[documents.file_D]
    documents = documents.take(np.arange(len(documents)).repeat(times))
    adopt_tokens(config, head, documents, target)
    data = PackedData(documents, config.row_len, config.seed)
    return Trainer(config, target, head.to(target.embedding.device), data, validation, score)


def read_data(config: TrainConfig, vocab_size: int, head: Head, listed: Path | None = None) -> Documents:
    """The documents of the recipe. The first process reports cut and omitted rows, and lists them in a file."""
    tally = Tally()
    mask_token = getattr(head.head_config, "mask_token", None)  # only of block heads
    paths = [file.path for file in config.files]
    documents = read_documents(
        paths, config.row_len, vocab_size, mask_token=mask_token, on_bad=config.on_bad, tally=tally
    )
    if dist.is_initialized() and dist.get_rank() > 0:
        return documents
    said = [tally.summary(config.row_len)]
    if listed is not None:
        if listing := tally.listing(config.row_len):
            write_whole(listed, listing)
        else:
            listed.unlink(missing_ok=True)
        said.append("" if tally.names_all() else f"all of them are listed in {listed}")
    for words in filter(None, (*said, *(foreign(path, config.model) for path in paths))):
        print(words, file=sys.stderr)
    return documents


def foreign(path: str, model: str) -> str | None:
    """A warning about data that another model has answered, according to its record; None if there is none."""
    meta = Path(f"{path}.meta.json")
    try:
        writer = json.loads(meta.read_text())["settings"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if writer == shown(model):
        return None
    return f"{path} was answered by {writer}, not by {shown(model)}: a head drafts for the model that wrote its data"


def adopt_tokens(config: TrainConfig, head: Head, documents: Documents, target: Decoder) -> None:
    """Gives a new EAGLE-3 head its vocabulary: the most frequent tokens of the data, with the target's rows."""
    if config.head.kind == "eagle3" and config.start is None:
        fresh = cast(Eagle3Head, head)
        fresh.adopt(frequent_tokens(documents, fresh.head_config.draft_vocab_size), target)


def frequent_tokens(documents: Documents, count: int) -> torch.Tensor:
    """The `count` tokens that the target wrote most often, ascending. Ties go to lower ids."""
    times_N = np.zeros(len(documents.token_N) + 1, np.int64)
    np.add.at(times_N, documents.start_D, 1)
    np.add.at(times_N, documents.end_D, -1)
    times_N = times_N.cumsum()[:-1] * documents.written_N
    seen_V = np.bincount(documents.token_N, weights=times_N, minlength=count)
    return torch.from_numpy(np.sort(np.argsort(-seen_V, kind="stable")[:count]))


def start_head(config: TrainConfig, target: Decoder) -> Head:
    """A new head, or the one to start from, with a new edge term if the recipe adds one."""
    if config.start is None:
        return new_head(config.head, target.config).init_weights(config.seed)
    loaded = load_any_head(config.start, target.config, dtype=torch.float32)
    check_agrees(config.head, loaded.head_config, config.start)
    if config.head.kind == "eagle3":
        return loaded
    head = cast(DraftHead, loaded)
    if problem := BLOCK.unwritable(head.head_config):
        raise ValueError(f"{config.start} cannot be trained: {problem}")
    if config.row_len <= head.head_config.block_size:
        raise ValueError(f"row_len {config.row_len} cannot hold a block of {head.head_config.block_size}")
    if config.head.edge_rank and head.edge is None:
        with_edge = replace(head.head_config, edge=edge_config(config.head))
        extended = DraftHead(with_edge).init_weights(config.seed)
        extended.load_state_dict(head.state_dict(), strict=False)
        return extended
    return head


def check_agrees(shape: HeadShape, head: HeadConfig | Eagle3Config, start: str) -> None:
    """Refuses settings that contradict the head to start from. A setting at its default counts as not given."""
    if shape.kind != head.kind:
        raise ValueError(f"head.kind is {shape.kind}, but the head to start from, {start}, is of kind {head.kind}")
    edge: EdgeConfig | None = getattr(head, "edge", None)
    found = {
        "num_layers": head.layers.num_layers,
        "tap_layers": head.tap_layers,
        "inner_size": head.layers.inner_size,
        "edge_rank": edge.rank if edge else shape.edge_rank,
        "edge_gate": gate_of(edge) if edge else shape.edge_gate,
        "conv_taps": head.conv.taps if isinstance(head, HeadConfig) and head.conv else 0,
        "draft_vocab": getattr(head, "draft_vocab_size", None),
        **{name: getattr(head, name, None) for name in ("block_size", "causal", "shifted", "mask_token", "depth")},
    }
    for name in ("tap_layers", "inner_size", *(BLOCK_ONLY if shape.kind == "block" else EAGLE3_ONLY)):
        wanted = getattr(shape, name)
        if wanted not in (getattr(HeadShape, name), found[name]):
            raise ValueError(
                f"head.{name} is {wanted}, but {found[name]} in the head to start from, {start}; leave it out"
            )


def new_head(shape: HeadShape, target: DecoderConfig) -> Head:
    """A head without weights, which must fit the target."""
    size = target.vocab_size
    if shape.kind == "block" and shape.mask_token is None:
        raise ValueError(
            "head.mask_token is not set; give the id of a token that never occurs in text,"
            " such as a reserved one in the model's tokenizer.json"
        )
    for name, value, most in (("mask_token", shape.mask_token, size - 1), ("draft_vocab", shape.draft_vocab, size)):
        if value is not None and value > most:
            raise ValueError(f"head.{name} is {value}; the vocabulary of the target has {size}")
    config = head_config(shape, target) if shape.kind == "block" else eagle3_config(shape, target)
    if not all(0 <= layer < target.num_layers for layer in config.tap_layers):
        named = f"{'is' if shape.tap_layers else 'would be'} {list(config.tap_layers)}"
        default = "" if shape.tap_layers else " by default"
        raise ValueError(f"head.tap_layers {named}{default}; the target has layers 0 to {target.num_layers - 1}")
    return DraftHead(config) if isinstance(config, HeadConfig) else Eagle3Head(config)


def eagle3_config(shape: HeadShape, target: DecoderConfig) -> Eagle3Config:
    """An EAGLE-3 head of one layer shaped like the target's."""
    return Eagle3Config(
        layers=replace(layers_like(target, 1, shape.inner_size), family="llama", qk_norm=False),
        tap_layers=shape.tap_layers or eagle3_tap_layers(target.num_layers),
        draft_vocab_size=shape.draft_vocab or min(DRAFT_VOCAB, target.vocab_size),
        depth=shape.depth or EAGLE3_DEPTH,
        num_target_layers=target.num_layers,
    )


def head_config(shape: HeadShape, target: DecoderConfig) -> HeadConfig:
    """A block head shaped like its target: the same width, heads and positions, fewer layers.

    Without a mask token it uses the last id, which is sufficient to measure speed.
    """
    return HeadConfig(
        layers=layers_like(target, shape.num_layers, shape.inner_size),
        tap_layers=shape.tap_layers or default_tap_layers(shape.num_layers, target.num_layers),
        mask_token=target.vocab_size - 1 if shape.mask_token is None else shape.mask_token,
        block_size=shape.block_size,
        causal=shape.causal,
        num_target_layers=target.num_layers,
        shifted=shape.shifted,
        edge=edge_config(shape) if shape.edge_rank else None,
        conv=ConvConfig(shape.conv_taps, math.gcd(ConvConfig.group, target.hidden_size)) if shape.conv_taps else None,
    )


def gate_of(edge: EdgeConfig) -> str:
    """The setting `head.edge_gate` of an edge term."""
    return "none" if not edge.gate else "biased" if edge.gate_bias else "alone"


def edge_config(shape: HeadShape) -> EdgeConfig:
    return EdgeConfig(shape.edge_rank, shape.edge_gate != "none", 0.0 if shape.edge_gate == "alone" else 1.0)


def layers_like(target: DecoderConfig, num_layers: int, inner_size: int | None) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        inner_size=target.inner_size if inner_size is None else inner_size,
        max_len=target.max_len,
        rope=target.rope,
        qk_norm=True,
    )


def join_processes() -> torch.device | None:
    """Under torchrun, joins the process group and returns the device of this process; otherwise returns None."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device
