"""Trees of a head, every draft temperature with every width, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tree_settings
from jetspec.models.heads import save_any_head
from jetspec.models.weights import load_target
from jetspec.train.config import load_recipe
from jetspec.train.run import start_head
from tests.benchmarks.test_ablate import write_questions, write_tiny_run
from tests.benchmarks.tiny_bench import invoke


def test_every_draft_temperature_with_every_width_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(write_tiny_run(tmp_path))
    torch.manual_seed(0)
    save_any_head(start_head(config, load_target(config.model).decoder), tmp_path / "mine" / "head")
    questions, out = write_questions(tmp_path / "eval"), tmp_path / "trees"
    words: tuple[object, ...] = (
        f"young={tmp_path / 'mine' / 'head'}",
        "--model",
        config.model,
        "--data-dir",
        questions,
        "--out",
        out,
    )
    words += ("--limit", 2, "--tokens", 8, "--draft-temperatures", "0.5,1", "--widths", "2,4")
    assert invoke("tree-settings", *words).exit_code == 0
    record = json.loads((out / "young.json").read_text())
    assert record["head"] == "mine/head" and record["questions"] == 2 and record["tokens"] == 8
    grid = [(0.5, 2), (0.5, 4), (1, 2), (1, 4)]
    assert [(tree["draft_temperature"], tree["width"]) for tree in record["trees"]] == grid
    for tree in record["trees"]:
        for budget, mean in tree["mean"].items():
            found = [row[budget] for row in tree["tokens_per_round"].values()]
            assert mean == pytest.approx(sum(found) / len(found)) and mean >= 1

    (kept := json.loads(json.dumps(record)))["trees"].pop(1)
    (out / "young.json").write_text(json.dumps(kept | {"weights": "of another head"}))
    refused = invoke("tree-settings", *words)
    assert refused.exit_code == 2 and "young.json" in refused.stderr
    (out / "young.json").write_text(json.dumps(kept))
    assert invoke("tree-settings", *words).exit_code == 0
    assert json.loads((out / "young.json").read_text())["trees"] == record["trees"]
    monkeypatch.setattr(tree_settings, "LLM", None)
    assert invoke("tree-settings", *words).exit_code == 0, "all is there, and no model is loaded"
    assert invoke("tree-settings", "mine", *words[1:]).exit_code == 2
