"""Training speed: a row per batch shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.train.loss import DraftLoss
from jetspec.train.passes import Passes
from jetspec.train.trainer import Trainer
from tests.benchmarks.test_ablate import write_tiny_run
from tests.benchmarks.tiny_bench import invoke


def test_a_row_per_shape(tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path)
    words = ["--recipe", str(recipe), "--shapes", "2x48x2,1x64x4", "--steps", "2", "--warmup", "1", "--out"]
    assert invoke("training", *words, str(tmp_path / "speed.json")).exit_code == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["rows"], row["row_len"], row["anchors"]) for row in record["shapes"]] == [(2, 48, 2), (1, 64, 4)]
    assert all(row["drafted_per_s"] >= row["positions_per_s"] > 0 for row in record["shapes"])
    for row in record["shapes"]:
        drafts = row["rows"] * row["anchors"] * 3
        assert row["drafted_per_s"] * row["step_ms"] / 1e3 == pytest.approx(drafts)


def test_steps_that_capture_are_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each of the first five steps captures a pass."""
    steps = 0

    def count(passes: Passes) -> int:
        return min(steps, 5)

    def take(trainer: Trainer) -> DraftLoss:
        nonlocal steps
        steps += 1
        return train_step(trainer)

    train_step = Trainer.train_step
    monkeypatch.setattr(Passes, "num_captured", property(count))
    monkeypatch.setattr(Trainer, "train_step", take)
    words = ["--recipe", str(write_tiny_run(tmp_path)), "--shapes", "2x48x2", "--steps", "2", "--warmup", "1", "--out"]
    assert invoke("training", *words, str(tmp_path / "speed.json")).exit_code == 0
    assert steps == 1 + 3 * 2, "after the warm-up, two windows that captured, and one that did not"
