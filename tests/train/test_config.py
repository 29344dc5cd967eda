"""Recipes are strict: what is not understood is an error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.train.config import DataFile, TrainConfig, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("data: [a.jsonl]\nout: runs/x\n" + text)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid(path: Path) -> None:
    assert isinstance(load_recipe(path), TrainConfig)


def test_overrides_reach_into_groups(tmp_path: Path) -> None:
    config = load_recipe(recipe(tmp_path, "steps: 5\n"), ("optimizer.lr=1e-3", "head.tap_layers=[1, 2]", "steps=7"))
    assert (config.optimizer.lr, config.head.tap_layers, config.steps) == (1e-3, (1, 2), 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 5\n", "unknown setting stepz; did you mean steps?"),
        ("optimizer: {learning: 1}\n", "unknown setting optimizer.learning"),
        ("loss: {kind: l2}\n", "loss.kind is 'l2'; choose one of forward_kl"),
        ("steps: many\n", "steps is 'many'; expected int"),
        ("steps: true\n", "steps is True; expected int"),
        ("steps: 0\n", "steps is 0"),
        ("loss: {gamma: 0}\n", "loss.gamma is 0.0; it must be positive, or null"),
        ("parallel: zero\n", "parallel is 'zero'; choose one of ddp, fsdp"),
        ("compile: sometimes\n", "compile is 'sometimes'; expected bool"),
        ("anchors_at_once: 0\n", "anchors_at_once is 0; it must be at least 1"),
        ("loss: 3\n", "loss must be a group"),
        ("minutes: 0\n", "minutes is 0.0; it must be positive, or null"),
        ("score: maybe\n", "score is 'maybe'; expected bool"),
        ("data: [3]\n", "data is 3; expected str"),
        ("data: [{path: a.jsonl, time: 2}]\n", "unknown setting data.time; did you mean times?"),
        ("data: [{path: a.jsonl, times: 0}]\n", "data.times is 0; it must be at least 1"),
        ("data: [{times: 2}]\n", "the recipe lacks data.path"),
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas must have 2 values"),
        ("train_only_edge: true\n", "needs an edge term"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_may_say_how_often_its_rows_are_seen(tmp_path: Path) -> None:
    config = load_recipe(recipe(tmp_path, "data: [{path: a.jsonl, times: 2}, b.jsonl]\n"))
    assert config.files == (DataFile("a.jsonl", 2), DataFile("b.jsonl", 1))
    assert load_recipe(recipe(tmp_path, "data: b.jsonl\n")).files == (DataFile("b.jsonl"),)


def test_missing_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("steps: 3\n")
    with pytest.raises(ValueError, match="lacks data, out"):
        load_recipe(path)
    with pytest.raises(ValueError, match="cannot read"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="of the form"):
        load_recipe(path, ("steps",))
