"""Training recipes are found by name and strict in what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.train.config import DataFile, TrainConfig, find_recipe, load_recipe, recipes


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    data = "" if text.startswith("data:") else "data: [a.jsonl]\n"
    path.write_text(f"out: runs/x\n{data}{text}")
    return path


@pytest.mark.parametrize("name", recipes())
def test_packaged_recipes_are_valid(name: str) -> None:
    config = load_recipe(name)
    assert isinstance(config, TrainConfig) and recipes()[name].endswith(".")
    assert config.head.mask_token is not None or config.head.kind == "eagle3"


def test_recipes_are_found_by_name_and_path(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps: 7\n")
    assert find_recipe("debug").name == "debug.yaml" and load_recipe(str(path)).steps == 7
    with pytest.raises(ValueError, match=r"smollm2_135m.*qwen3_8b"):
        find_recipe("smolm2_135m")
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        find_recipe(tmp_path / "nowhere.yaml")


def test_overrides_reach_into_sections(tmp_path: Path) -> None:
    config = load_recipe(recipe(tmp_path, "steps: 5\n"), ("optimizer.lr=1e-3", "head.tap_layers=[1, 2]", "steps=7"))
    assert (config.optimizer.lr, config.head.tap_layers, config.steps) == (1e-3, (1, 2), 7)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lr: 3\n", "optimizer.lr"),
        ("kind: muon\n", "head.kind or loss.kind or optimizer.kind"),
        ("steps: 0\n", "steps"),
        ("keep: 0\n", "keep"),
        ("seed: -1\n", "seed"),
        ("minutes: .nan\n", "minutes"),
        ("anchors_at_once: 0\n", "anchors_at_once"),
        ("validation_rows: -1\n", "validation_rows"),
        ("score: true\nvalidation_rows: 0\n", "validation_rows"),
        ("on_bad: ignore\n", "on_bad"),
        ("row_len: 16\n", "row_len"),
        ("data: []\n", "data"),
        ("data: [3]\n", "data"),
        ("data: [{path: a.jsonl, time: 2}]\n", "data.times"),
        ("data: [{path: a.jsonl, times: 0}]\n", "data.times"),
        ("data: [{times: 2}]\n", "data.path"),
        ("train_only_edge: true\n", "edge_rank"),
        ("train_only_edge: true\nhead: {edge_rank: 4}\n", "start"),
        ("head: {kind: eagle3, edge_rank: 4}\n", "head.edge_rank"),
        ("head: {kind: eagle3, tap_layers: [1]}\n", "head.tap_layers"),
        ("head: {depth: 3}\n", "head.depth"),
        ("head: {num_layers: 0}\n", "head.num_layers"),
        ("head: {block_size: 1}\n", "head.block_size"),
        ("head: {block_size: 2000}\n", "head.block_size"),
        ("head: {tap_layers: []}\n", "head.tap_layers"),
        ("head: {tap_layers: [-1]}\n", "head.tap_layers"),
        ("head: {mask_token: -1}\n", "head.mask_token"),
        ("head: {inner_size: 0}\n", "head.inner_size"),
        ("loss: {gamma: 0}\n", "loss.gamma"),
        ("loss: {gamma: 2, dpace: 0.5}\n", "loss.dpace"),
        ("loss: {temperature: .nan}\n", "loss.temperature"),
        ("optimizer: {clip: .nan}\n", "optimizer.clip"),
        ("optimizer: {lr: .inf}\n", "optimizer.lr"),
        ("optimizer: {weight_decay: -5}\n", "optimizer.weight_decay"),
        ("optimizer: {betas: [.nan, 0.9]}\n", "optimizer.betas"),
        ("optimizer: {warmup_frac: 1.5}\n", "optimizer.warmup_frac"),
        ("optimizer: {final_lr_frac: -1}\n", "optimizer.final_lr_frac"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(tmp_path, text))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_data_files_may_be_repeated(tmp_path: Path) -> None:
    config = load_recipe(recipe(tmp_path, "data: [{path: a.jsonl, times: 2}, b.jsonl]\n"))
    assert config.files == (DataFile("a.jsonl", 2), DataFile("b.jsonl", 1))
    assert load_recipe(recipe(tmp_path, "data: b.jsonl\n")).files == (DataFile("b.jsonl"),)


def test_missing_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("steps: 3\n")
    with pytest.raises(ValueError, match="data, out"):
        load_recipe(path)
