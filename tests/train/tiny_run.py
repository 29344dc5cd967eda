"""Training of a tiny head on answers of a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetspec.config import EngineConfig
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
