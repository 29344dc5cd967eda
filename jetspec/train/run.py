"""A recipe becomes a run: load, resume, train."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jetspec.config import EAGLE3_DEPTH
from jetspec.data.corpus import Documents, PackedData, Tally, read_documents
from jetspec.files import write_whole
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head, eagle3_tap_layers
from jetspec.models.heads import Head, load_any_head
from jetspec.record import shown
from jetspec.train.config import HeadShape, TrainConfig
from jetspec.train.trainer import Score, Trainer

DRAFT_VOCAB = 32_000
"""Tokens of an EAGLE-3 head, unless a recipe says otherwise."""
ROWS_FILE = "rows_cut_or_left_out.txt"
"""Lists what a run does not take from its data as it is."""


def make_trainer(
    config: TrainConfig, target: Decoder, score: Score | None = None, listed: Path | None = None
) -> Trainer:
    """Everything but the target, ready to run."""
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
    """The documents of the recipe. The first process says what was cut or left out, and lists it in a file, if any."""
    tally = Tally()
    mask_token = head.head_config.mask_token if isinstance(head, DraftHead) else None
    paths = [file.path for file in config.files]
    documents = read_documents(
        paths, config.row_len, vocab_size, mask_token=mask_token, on_bad=config.on_bad, tally=tally
    )
    if dist.is_initialized() and dist.get_rank() > 0:
        return documents
    said = [tally.summary(config.row_len)]
    if listed is not None:
        replace_list(listed, tally.listing(config.row_len))
        said.append("" if tally.names_all(config.row_len) else f"all of them are listed in {listed}")
    for words in filter(None, (*said, *(foreign(path, config.model) for path in paths))):
        print(words, file=sys.stderr)
    return documents


def replace_list(path: Path, text: str) -> None:
    """A list of nothing is no file."""
    if text:
        write_whole(path, text)
    else:
        path.unlink(missing_ok=True)


def foreign(path: str, model: str) -> str | None:
    """What to say of data that another model has answered, by what `jetspec data regenerate` wrote beside it."""
    meta = Path(f"{path}.meta.json")
    try:
        writer = json.loads(meta.read_text())["settings"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if writer == shown(model):
        return None
    return f"{path} was answered by {writer}, not by {shown(model)}: a head drafts for the model that wrote its data"


def adopt_tokens(config: TrainConfig, head: Head, documents: Documents, target: Decoder) -> None:
    """A fresh EAGLE-3 head drafts the tokens that the data has most of, and starts from the target's rows for them."""
    if isinstance(head, Eagle3Head) and config.start is None:
        head.adopt(frequent_tokens(documents, head.head_config.draft_vocab_size), target)


def frequent_tokens(documents: Documents, count: int) -> torch.Tensor:
    """The tokens that the target wrote most often, ascending. Of equally frequent ones the lower come first."""
    times_N = np.zeros(len(documents.token_N) + 1, np.int64)
    np.add.at(times_N, documents.start_D, 1)
    np.add.at(times_N, documents.end_D, -1)
    times_N = times_N.cumsum()[:-1] * documents.written_N
    seen_V = np.bincount(documents.token_N, weights=times_N, minlength=count)
    return torch.from_numpy(np.sort(np.argsort(-seen_V, kind="stable")[:count]))


def start_head(config: TrainConfig, target: Decoder) -> Head:
    """A fresh head, or the one to start from, with a fresh edge term if the recipe adds one."""
    if config.start is None and config.head.kind == "eagle3":
        return Eagle3Head(eagle3_config(config.head, target.config)).init_weights(config.seed)
    if config.start is None:
        check_shape(config.head, target.config)
        return DraftHead(head_config(config.head, target.config)).init_weights(config.seed)
    head = load_any_head(config.start, target.config, dtype=torch.float32)
    check_agrees(config.head, head.head_config, config.start)
    if isinstance(head, Eagle3Head):
        return head
    if config.row_len <= head.head_config.block_size:
        raise ValueError(f"row_len {config.row_len} cannot hold a block of {head.head_config.block_size}")
    if config.head.edge_rank and head.edge is None:
        with_edge = replace(head.head_config, edge=EdgeConfig(config.head.edge_rank))
        fresh = DraftHead(with_edge).init_weights(config.seed)
        fresh.load_state_dict(head.state_dict(), strict=False)
        return fresh
    return head


def check_shape(shape: HeadShape, target: DecoderConfig) -> None:
    """Refuse a fresh head that does not fit the target."""
    if shape.mask_token is None:
        raise ValueError(
            "head.mask_token is not set; give the id of a token that never occurs in text,"
            " such as a reserved one in the model's tokenizer.json"
        )
    if shape.mask_token >= target.vocab_size:
        raise ValueError(f"head.mask_token is {shape.mask_token}; the vocabulary of the target has {target.vocab_size}")
    check_taps(head_config(shape, target).tap_layers, shape, target)


def check_taps(taps: tuple[int, ...], shape: HeadShape, target: DecoderConfig) -> None:
    if not all(0 <= layer < target.num_layers for layer in taps):
        named = f"is {list(taps)}" if shape.tap_layers else f"would be {list(taps)} by default"
        raise ValueError(f"head.tap_layers {named}; the target has layers 0 to {target.num_layers - 1}")


def check_agrees(shape: HeadShape, head: HeadConfig | Eagle3Config, start: str) -> None:
    """Refuse a setting that the head to start from contradicts. One at its default counts as not given."""
    kind = "block" if isinstance(head, HeadConfig) else "eagle3"
    if shape.kind != kind:
        raise ValueError(f"head.kind is {shape.kind}, but the head to start from, {start}, is of kind {kind}")
    for name, value in (_found(head, shape) if isinstance(head, HeadConfig) else _eagle3_found(head)).items():
        wanted = getattr(shape, name)
        if wanted not in (getattr(HeadShape, name), value):
            raise ValueError(f"head.{name} is {wanted}, but {value} in the head to start from, {start}; leave it out")


def _eagle3_found(head: Eagle3Config) -> dict[str, Any]:
    return {
        "tap_layers": head.tap_layers,
        "inner_size": head.layers.inner_size,
        "depth": head.depth,
        "draft_vocab": head.draft_vocab_size,
    }


def _found(head: HeadConfig, shape: HeadShape) -> dict[str, Any]:
    layers = head.layers
    return {
        "num_layers": layers.num_layers,
        "block_size": head.block_size,
        "causal": head.causal,
        "tap_layers": head.tap_layers,
        "mask_token": head.mask_token,
        "inner_size": layers.inner_size,
        "edge_rank": head.edge.rank if head.edge else shape.edge_rank,
    }


def eagle3_config(shape: HeadShape, target: DecoderConfig) -> Eagle3Config:
    """A head in the image of its target, of one layer."""
    vocab = min(DRAFT_VOCAB, target.vocab_size) if shape.draft_vocab is None else shape.draft_vocab
    if vocab > target.vocab_size:
        raise ValueError(f"head.draft_vocab is {vocab}; the vocabulary of the target has {target.vocab_size}")
    taps = eagle3_tap_layers(target.num_layers) if shape.tap_layers is None else shape.tap_layers
    check_taps(taps, shape, target)
    return Eagle3Config(
        layers=replace(layers_like(target, 1, shape.inner_size), family="llama", qk_norm=False),
        tap_layers=taps,
        draft_vocab_size=vocab,
        depth=shape.depth or EAGLE3_DEPTH,
        num_target_layers=target.num_layers,
    )


def head_config(shape: HeadShape, target: DecoderConfig) -> HeadConfig:
    """A head in the image of its target: same width, heads and positions, fewer layers.

    Without a mask token it takes the last id, which does to measure speed.
    """
    layers = layers_like(target, shape.num_layers, shape.inner_size)
    taps = default_tap_layers(shape.num_layers, target.num_layers) if shape.tap_layers is None else shape.tap_layers
    return HeadConfig(
        layers=layers,
        tap_layers=taps,
        mask_token=target.vocab_size - 1 if shape.mask_token is None else shape.mask_token,
        block_size=shape.block_size,
        causal=shape.causal,
        num_target_layers=target.num_layers,
        edge=EdgeConfig(shape.edge_rank) if shape.edge_rank else None,
    )


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
    """Under torchrun, meet the other processes and take this one's device; otherwise nothing to do."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device
