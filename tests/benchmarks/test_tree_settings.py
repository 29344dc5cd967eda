"""Trees of a head, every heat with every width, on a model that fits in a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tree_settings
from benchmarks.pages import marks
from jetspec.models.heads import save_any_head
from jetspec.models.weights import load_target
from jetspec.train.config import load_recipe
from jetspec.train.run import start_head
from tests.benchmarks.test_ablate import write_questions, write_tiny_run


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["tree_settings", *map(str, words)])
    tree_settings.main()


def test_every_heat_with_every_width_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_recipe(write_tiny_run(tmp_path))
    torch.manual_seed(0)
    save_any_head(start_head(config, load_target(config.model).decoder), tmp_path / "mine" / "head")
    questions, out, page = write_questions(tmp_path / "eval"), tmp_path / "trees", tmp_path / "page.md"
    begin, end = marks("trees")
    page.write_text(f"before\n{begin}\n{end}\nafter\n")
    words = f"young={tmp_path / 'mine' / 'head'}", "--model", config.model, "--data-dir", questions, "--out", out
    small = "--limit", 2, "--tokens", 8, "--heats", 0.5, 1, "--widths", 2, 4
    run(monkeypatch, *words, *small, "--page", page)
    record = json.loads((out / "young.json").read_text())
    assert record["head"] == "mine/head" and record["questions"] == 2 and record["tokens"] == 8
    assert [(tree["draft_temperature"], tree["width"]) for tree in record["trees"]] == [
        (0.5, 2),
        (0.5, 4),
        (1, 2),
        (1, 4),
    ]
    for tree in record["trees"]:
        for budget, mean in tree["mean"].items():
            found = [row[budget] for row in tree["tokens_per_round"].values()]
            assert mean == pytest.approx(sum(found) / len(found)) and mean >= 1
    text = page.read_text()
    best = max(tree["mean"]["16"] for tree in record["trees"])
    assert text.count("`young`, mine/head") == 1 and f"**{best:.3f}**" in text and text.endswith("after\n")

    (kept := json.loads(json.dumps(record)))["trees"].pop(1)
    (out / "young.json").write_text(json.dumps(kept))
    run(monkeypatch, "--out", out, "--page", page)
    assert "\n\nNot measured: heat 0.5 with width 4. " in page.read_text() and "Not measured" not in text
    with monkeypatch.context() as patch:
        patch.setattr(tree_settings, "current_commit", lambda: "another")
        with pytest.raises(SystemExit, match=r"young\.json was begun by another commit"):
            run(monkeypatch, *words, *small)
        patch.setattr(tree_settings, "current_commit", lambda: record["commit"])
        for unlike in ({**kept, "weights": "of another head"}, {k: v for k, v in kept.items() if k != "weights"}):
            (out / "young.json").write_text(json.dumps(unlike))
            with pytest.raises(SystemExit, match=r"young\.json was begun .* with another head"):
                run(monkeypatch, *words, *small)
        (out / "young.json").write_text(json.dumps(kept))
        scored = []

        def score(*inputs: Any) -> Any:
            scored.append(inputs[-1])
            return record["trees"][1]

        patch.setattr(tree_settings, "score", score)
        run(monkeypatch, *words, *small)
    assert [(tree.draft_temperature, tree.width) for tree in scored] == [(0.5, 4)], "only what was missing"
    assert json.loads((out / "young.json").read_text())["trees"] == record["trees"]

    monkeypatch.setattr(tree_settings, "LLM", None)
    run(monkeypatch, *words, *small)
    run(monkeypatch, "--out", out, "--page", page)
    assert page.read_text() == text, "from the record alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heads/mine", "--data-dir", "x", "--out", "y"], "NAME=HEAD"),
        (["mine=heads/mine", "--out", "y"], "--data-dir"),
        (["--out", "y", "--page", "z"], "no record"),
    ],
)
def test_what_is_missing_is_said(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *words)
    assert message in capsys.readouterr().err
