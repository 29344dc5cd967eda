"""The ablation script on a model that fits in a test."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import ablate
from jetspec.config import TreeConfig
from jetspec.models.head_format import load_head
from jetspec.train.config import load_recipe
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
    for task in ablate.TASKS:
        rows = [{"id": f"{task}-{i}", "turns": [f"What is {i}?"]} for i in range(2)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def setup(tmp_path: Path) -> list[str]:
    recipe, questions = write_tiny_run(tmp_path), write_questions(tmp_path / "eval")
    common = ["--recipe", str(recipe), "--data-dir", str(questions), "--limit", "2", "--tokens", "8"]
    (tmp_path / "corpus.jsonl").write_text((tmp_path / "answers.jsonl").read_text())
    return [*common, "--corpus", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "records")]


def test_every_variant_is_trained_once_and_scored_alike(setup: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path(setup[-1])
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, "--only", "causal,edge-32,corpus"])
    ablate.main()
    records = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    assert set(records) == {"causal", "edge-32", "corpus"}
    for record in records.values():
        assert set(record["tokens_per_round"]) == set(ablate.TASKS)
        assert all(1 <= record["mean"][budget] <= 4 for budget in ablate.BUDGETS)
        assert [step for step, _ in record["losses"]] == [3]
        data = "corpus.jsonl" if record["variant"] == "corpus" else "answers.jsonl"
        assert record["settings"]["steps"] == 3 and record["settings"]["data"] == [data]
        assert record["tree"] == json.loads(json.dumps(asdict(TreeConfig())))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(ablate, "LLM", None)  # nothing is loaded when nothing is to do
    ablate.main()
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_heads_are_kept_where_asked_for(setup: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the record is there already from a run that kept none."""
    words = ["ablate", *setup, "--only", "causal,edge-32"]
    monkeypatch.setattr(sys, "argv", [*words[:-1], "causal"])
    ablate.main()
    monkeypatch.setattr(sys, "argv", [*words, "--keep-heads", str(tmp_path / "heads")])
    ablate.main()
    heads = {path.name: load_head(path) for path in (tmp_path / "heads").iterdir()}
    assert set(heads) == {"causal", "edge-32"} and all(
        head.fc.weight.dtype == torch.bfloat16 for head in heads.values()
    )
    assert heads["causal"].edge is None and heads["edge-32"].edge is not None


def test_a_variant_changes_what_it_names_and_nothing_else(setup: list[str]) -> None:
    base = load_recipe(Path(setup[1]), ("optimizer.kind=muon", "optimizer.lr=0.005"))
    causal = ablate.VARIANTS["causal"].of(base)
    texts = {text: Path(f"{text}.jsonl") for text in ("regenerated", "corpus")}
    for name, variant in ablate.VARIANTS.items():
        if variant.eagle3:
            continue
        made = variant.of(base, texts)
        changed = {
            "edge_rank": made.head.edge_rank != causal.head.edge_rank,
            "causal": made.head.causal != causal.head.causal,
            "kind": made.loss.kind != causal.loss.kind,
            "gamma": made.loss.gamma != causal.loss.gamma,
            "lr": made.optimizer.lr != causal.optimizer.lr,
            "optimizer": made.optimizer.kind != causal.optimizer.kind,
        }
        words = {"edge": "edge_rank", "bidirectional": "causal", "gamma": "gamma", "lr": "lr", "sft": "kind"}
        words |= {"reverse": "kind", "adamw": "optimizer"}
        named = {setting for word, setting in words.items() if word in name.split("-")}
        named |= {"lr"} if name == "adamw" else set()
        assert {setting for setting, is_other in changed.items() if is_other} == named, name
        data = base.data if variant.text is None else (f"{variant.text}.jsonl",)
        seed = int(name[-1]) if "-seed-" in name else base.seed
        assert made.steps == base.steps and made.data == data and made.seed == seed


def test_an_eagle3_recipe_is_varied_in_its_optimizer_alone(
    setup: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(setup[1])
    block = "head: {num_layers: 1, block_size: 4, mask_token: 2, tap_layers: [0]}"
    eagle3 = "head: {kind: eagle3, depth: 2, draft_vocab: 40, tap_layers: [0, 0, 1]}\nloss: {gamma: 4.5}"
    recipe.write_text(recipe.read_text().replace(block, eagle3))
    base = load_recipe(recipe)
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, "--only", "eagle3-adamw-0.002,eagle3-muon-0.005"])
    ablate.main()
    for name, kind, lr in (("eagle3-adamw-0.002", "adamw", 2e-3), ("eagle3-muon-0.005", "muon", 5e-3)):
        made = ablate.VARIANTS[name].of(base)
        assert (made.optimizer.kind, made.optimizer.lr) == (kind, lr)
        assert replace(made, optimizer=base.optimizer) == base
        record = json.loads((Path(setup[-1]) / f"{name}.json").read_text())
        assert (
            record["tree"]["width"] == 10
            and record["tree"]["draft_temperature"] == 1
            and 1 <= record["mean"]["16"] <= 3
        )
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, "--only", "eagle3-muon-0.01,causal"])
    with pytest.raises(SystemExit, match="2"):
        ablate.main()
    assert "not causal: " in (said := capsys.readouterr().err) and "trains a head of kind eagle3" in said
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, "--only", "causl"])
    with pytest.raises(SystemExit, match="2"):
        ablate.main()
    assert "not causl: there is none; choose among eagle3-adamw-0.0005" in capsys.readouterr().err


def test_texts_are_compared_on_the_prompts_that_all_of_them_answer(
    setup: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus.jsonl").write_text("\n".join(["", *rows[3:]]))
    (tmp_path / "own.jsonl").write_text("".join(rows[:-2]))
    words = ["--only", "regenerated,corpus", "--regenerated", str(tmp_path / "own.jsonl")]
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, *words])
    ablate.main()
    records = [json.loads((Path(setup[-1]) / f"{text}.json").read_text()) for text in ("regenerated", "corpus")]
    assert [record["documents"] for record in records] == [len(rows) - 5] * 2
    assert records[0]["losses"] == records[1]["losses"]  # the same rows here, in the same order


def test_a_variant_whose_text_is_not_given_is_refused(
    setup: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ablate", *setup, "--only", "causal,regenerated"])
    with pytest.raises(SystemExit, match="2"):
        ablate.main()
    assert "the variant regenerated needs --regenerated FILE" in capsys.readouterr().err
