"""Ablations, trees of a head, and the speed of training, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import training
from jetspec.config import TreeConfig
from jetspec.models.head_format import load_head
from jetspec.models.heads import save_any_head
from jetspec.models.weights import load_target
from jetspec.train.config import load_recipe
from jetspec.train.run import start_head
from tests.benchmarks.tiny_bench import invoke
from tests.train.tiny_model import write_model


def write_tiny_run(tmp_path: Path) -> Path:
    """A model, answers that it may have written, and a recipe that trains on them: the path of that."""
    model = write_model(tmp_path / "model")
    written = [{"id": f"row-{i}", "token_ids": [*range(i + 3, i + 43)], "spans": [[8, 40]]} for i in range(20)]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in written))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\ndata: [{answers}]\nout: {tmp_path / 'run'}\nsteps: 3\nrows: 2\nrow_len: 96\nanchors: 4\n"
        "head: {num_layers: 1, block_size: 4, mask_token: 2, tap_layers: [0]}\ndtype: float32\ndevice: cpu\n"
    )
    return recipe


def write_questions(folder: Path) -> Path:
    folder.mkdir()
    for task in training.TASKS:
        rows = [{"id": f"{task}-{i}", "turns": [f"What is {i}?"]} for i in range(2)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def setup(tmp_path: Path) -> list[str]:
    recipe, questions = write_tiny_run(tmp_path), write_questions(tmp_path / "eval")
    common = ["--recipe", str(recipe), "--data-dir", str(questions), "--limit", "2", "--tokens", "8"]
    (tmp_path / "corpus.jsonl").write_text((tmp_path / "answers.jsonl").read_text())
    return [*common, "--corpus", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "records")]


def test_every_variant_is_trained_once_and_scored_alike(
    setup: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that an earlier run did not keep is trained again."""
    out = Path(setup[-1])
    words = ["ablate", *setup, "--only", "causal,edge-32,corpus", "--keep-heads", tmp_path / "heads"]
    assert invoke("ablate", *setup, "--only", "causal").exit_code == invoke(*words).exit_code == 0
    records = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    heads = {path.name: load_head(path) for path in (tmp_path / "heads").iterdir()}
    assert set(records) == set(heads) == {"causal", "edge-32", "corpus"}
    assert all(head.fc.weight.dtype == torch.bfloat16 for head in heads.values())
    assert heads["causal"].edge is None and heads["edge-32"].edge is not None
    for record in records.values():
        assert set(record["tokens_per_round"]) == set(training.TASKS)
        assert all(1 <= record["mean"][budget] <= 4 for budget in training.BUDGETS)
        assert [step for step, _ in record["losses"]] == [3]
        data = "corpus.jsonl" if record["variant"] == "corpus" else "answers.jsonl"
        assert record["settings"]["steps"] == 3 and record["settings"]["data"] == [data]
        assert record["tree"] == json.loads(json.dumps(asdict(TreeConfig(ngrams=False))))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(training, "LLM", None)  # nothing is loaded when nothing is to do
    assert invoke(*words).exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_an_eagle3_recipe_varies_in_its_optimizer_alone(setup: list[str]) -> None:
    recipe = Path(setup[1])
    block = "head: {num_layers: 1, block_size: 4, mask_token: 2, tap_layers: [0]}"
    eagle3 = "head: {kind: eagle3, depth: 2, draft_vocab: 40, tap_layers: [0, 0, 1]}\nloss: {gamma: 4.5}"
    recipe.write_text(recipe.read_text().replace(block, eagle3))
    base = load_recipe(recipe)
    assert invoke("ablate", *setup, "--only", "eagle3-adamw-0.002").exit_code == 0
    made = training.variant_of(recipe, (), "eagle3-adamw-0.002")
    assert (made.optimizer.kind, made.optimizer.lr) == ("adamw", 2e-3)
    assert replace(made, optimizer=base.optimizer) == base
    record = json.loads((Path(setup[-1]) / "eagle3-adamw-0.002.json").read_text())
    assert (record["tree"]["width"], record["tree"]["draft_temperature"]) == (10, 1) and 1 <= record["mean"]["16"] <= 3
    for other in ("causal", "causl"):
        refused = invoke("ablate", *setup, "--only", f"eagle3-muon-0.01,{other}")
        assert refused.exit_code == 2 and other in refused.stderr


def test_texts_are_compared_on_their_common_prompts(setup: list[str], tmp_path: Path) -> None:
    rows = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus.jsonl").write_text("\n".join(["", *rows[3:]]))
    (tmp_path / "own.jsonl").write_text("".join(rows[:-2]))
    words = ["--only", "regenerated,corpus", "--regenerated", str(tmp_path / "own.jsonl")]
    assert invoke("ablate", *setup, *words).exit_code == 0
    records = [json.loads((Path(setup[-1]) / f"{text}.json").read_text()) for text in ("regenerated", "corpus")]
    assert [record["documents"] for record in records] == [len(rows) - 5] * 2
    assert records[0]["losses"] == records[1]["losses"]  # the same rows here, in the same order


def test_a_variant_without_its_text_is_refused(setup: list[str]) -> None:
    refused = invoke("ablate", *setup, "--only", "causal,regenerated")
    assert refused.exit_code == 2 and "--regenerated" in refused.stderr


def test_every_draft_temperature_with_every_width_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(write_tiny_run(tmp_path))
    torch.manual_seed(0)
    save_any_head(start_head(config, load_target(config.model).decoder), tmp_path / "mine" / "head")
    questions, out = write_questions(tmp_path / "eval"), tmp_path / "trees"
    paths = ["--model", config.model, "--data-dir", questions, "--out", out]
    words: tuple[object, ...] = (f"young={tmp_path / 'mine' / 'head'}", *paths)
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
    monkeypatch.setattr(training, "LLM", None)
    assert invoke("tree-settings", *words).exit_code == 0, "all is there, and no model is loaded"
    assert invoke("tree-settings", "mine", *words[1:]).exit_code == 2


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
