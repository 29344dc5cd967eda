"""Captured passes give the gradients of eager ones."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.models.decoder import Decoder
from jetspec.train.config import HeadShape, LossConfig, TrainConfig
from jetspec.train.passes import Passes
from jetspec.train.run import make_trainer
from jetspec.train.trainer import Trainer
from tests.engine.tiny import randomize
from tests.rerun import RerunPool
from tests.train.tiny_run import TARGET, recipe, weights


def capturing(config: TrainConfig) -> Trainer:
    trainer = make_trainer(config, TARGET)
    trainer.passes = Passes(trainer.model, TARGET, RerunPool(trainer.device))
    return trainer


EAGLE = HeadShape(kind="eagle3", tap_layers=(0, 1, 1), depth=3, draft_vocab=30)


@pytest.mark.parametrize("sizes", [1, 8, 1024])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2, "anchors_at_once": 3},
        {"loss": LossConfig(dpace=0.5, gamma=None)},
        {"head": EAGLE},
    ],
    ids=["plain", "groups", "dpace", "eagle3"],
)
def test_captured_passes_give_the_same_steps(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sizes: int
) -> None:
    config = replace(recipe(answers, tmp_path), **changes)
    plain, captured = make_trainer(config, TARGET), capturing(config)
    monkeypatch.setattr("jetspec.train.trainer.SIZE_MULTIPLE", sizes)
    for step in range(4):
        expected, found = plain.train_step(), captured.train_step()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        if step == 1:  # the gradients of a validation are discarded
            assert captured.validate().loss == pytest.approx(plain.validate().loss, rel=1e-4)
    torch.testing.assert_close(weights(captured), weights(plain), atol=1e-4, rtol=1e-4)


def test_sizes_are_captured_once(answers: Path, tmp_path: Path) -> None:
    trainer = capturing(recipe(answers, tmp_path, anchors_at_once=3))
    for _ in range(3):
        trainer.train_step()
    assert trainer.passes.num_captured == 3, "the target, groups of 3, and a last one of 2"


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "anchors_at_once": 3}, {"head": EAGLE}])
def test_captured_training_on_a_gpu_follows_the_cpu(answers: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = replace(recipe(answers, tmp_path), **changes)
    size = TARGET.config.head_dim * 2  # the smallest heads of FlexAttention's kernels
    target = randomize(Decoder(replace(TARGET.config, head_dim=size)), 1, 0.15)
    expected, found = make_trainer(config, target), make_trainer(config, copy.deepcopy(target).to("cuda"))
    assert expected.passes.pool is None and found.passes.pool is not None
    for _ in range(4):
        sums = found.train_step().map(Tensor.cpu)
        torch.testing.assert_close(sums, expected.train_step(), atol=1e-2, rtol=1e-3)
    assert found.validate().loss == pytest.approx(expected.validate().loss, rel=1e-2)
    torch.testing.assert_close(
        {name: x.cpu() for name, x in weights(found).items()}, weights(expected), atol=1e-3, rtol=1e-2
    )
