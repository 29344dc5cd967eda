"""The record of training speed has a row per number of anchors, from steps that were taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import check_training
from tests.scripts.test_ablate import write_tiny_run


def test_a_row_per_number_of_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_tiny_run(tmp_path)
    words = ["--recipe", str(recipe), "--anchors", "2,4", "--steps", "2", "--warmup", "1", "--out"]
    monkeypatch.setattr(sys, "argv", ["check_training", *words, str(tmp_path / "speed.json")])
    check_training.main()
    record = json.loads((tmp_path / "speed.json").read_text())
    assert [row["anchors"] for row in record["speeds"]] == [2, 4]
    assert all(row["positions_per_s"] > 0 and row["step_ms"] > 0 for row in record["speeds"])
