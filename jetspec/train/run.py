"""A recipe becomes a run: load, resume, train."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.head_format import load_head
from jetspec.train.config import HeadShape, TrainConfig
from jetspec.train.data import PackedData, read_documents
from jetspec.train.trainer import Score, Trainer


def make_trainer(config: TrainConfig, target: Decoder, score: Score | None = None) -> Trainer:
    """Everything but the target, ready to run."""
    documents = read_documents([file.path for file in config.files], config.row_len, target.config.vocab_size)
    validation = None
    if config.validation_rows:
        # Drawn from everywhere: files list short answers first, because those were finished first.
        order = np.random.default_rng(config.seed).permutation(len(documents))
        documents = documents.take(order)
        held_out = max(1, min(len(documents) // 10, config.validation_rows * 4))
        packed = PackedData(documents[:held_out], config.row_len, config.seed)
        validation = packed.batch(0, min(config.validation_rows, packed.rows_per_pass))
        documents = documents[held_out:]
    times = np.array([file.times for file in config.files])[documents.file_D]
    data = PackedData(documents.take(np.arange(len(documents)).repeat(times)), config.row_len, config.seed)
    head = start_head(config, target).to(target.embedding.device)
    return Trainer(config, target, head, data, validation, score)


def start_head(config: TrainConfig, target: Decoder) -> DraftHead:
    shape = head_config(config.head, target.config)
    if config.start is None:
        return DraftHead(shape).init_weights(config.seed)
    head = load_head(config.start, target.config, dtype=torch.float32)
    if shape.edge is not None and head.edge is None:
        fresh = DraftHead(HeadConfig(**{**vars(head.head_config), "edge": shape.edge})).init_weights(config.seed)
        fresh.load_state_dict(head.state_dict(), strict=False)
        return fresh
    return head


def head_config(shape: HeadShape, target: DecoderConfig) -> HeadConfig:
    """A head in the image of its target: same width, heads and positions, fewer layers."""
    layers = DecoderConfig(
        family="qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=shape.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        inner_size=shape.inner_size or target.inner_size,
        max_len=target.max_len,
        rope=target.rope,
        qk_norm=True,
    )
    return HeadConfig(
        layers=layers,
        tap_layers=shape.tap_layers or default_tap_layers(shape.num_layers, target.num_layers),
        mask_token=target.vocab_size - 1 if shape.mask_token is None else shape.mask_token,
        block_size=shape.block_size,
        causal=shape.causal,
        num_target_layers=target.num_layers,
        edge=EdgeConfig(shape.edge_rank) if shape.edge_rank else None,
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
