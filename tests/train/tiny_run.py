"""Training of a tiny head on answers of a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetspec.config import EngineConfig
from jetspec.data.corpus import PackedBatch
from jetspec.train.config import HeadShape, OptimizerConfig, TrainConfig
from jetspec.train.trainer import Trainer
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, run, tiny_decoder

TARGET = tiny_decoder(layers=3, spread=0.15)
SHAPE = HeadShape(num_layers=2, block_size=5, tap_layers=(0, 1), mask_token=46, edge_rank=4)


def write_answers(path: Path, count: int) -> Path:
    """Writes prompts with answers of the tiny target."""
    prompts = [[5 + i % 40, 6 + i // 7] for i in range(count)]
    done = run(make_engine(TARGET, config=EngineConfig(max_batch=20)), prompts, SamplingParams(max_tokens=24))
    return write_rows(path, ({"token_ids": p + c.token_ids} for p, c in zip(prompts, done, strict=True)))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"spans": [[2, 26]], **row}) + "\n" for row in rows))
    return path


def packed(rows: int, length: int, vocab: int, seed: int = 4) -> PackedBatch:
    """Rows of three documents, then padding."""
    sizes = [length // 2, length // 8, length // 4]
    padding = length - sum(sizes)
    document = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*sizes, padding]))
    position = torch.cat([*(torch.arange(n) for n in sizes), torch.zeros(padding, dtype=torch.long)])
    token = torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    written = (document >= 0) & (position > 1)
    return PackedBatch(token, *(x.repeat(rows, 1) for x in (position, document, written)))


def recipe(answers: Path, out: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        data=(str(answers),),
        out=str(out),
        head=SHAPE,
        optimizer=OptimizerConfig(lr=5e-3),
        steps=6,
        rows=2,
        row_len=60,
        anchors=8,
        validation_rows=2,
        save_every=3,
        validate_every=3,
        log_every=1,
        dtype="float32",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.head.named_parameters()}


def card_of(out: Path) -> str:
    """The model card of a run."""
    return (out / "head" / "README.md").read_text()


def log_of(out: Path) -> list[dict[str, Any]]:
    """The reports of a run."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
