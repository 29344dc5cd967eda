"""Recipes are strict: what is not understood is an error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.train.config import DataFile, TrainConfig, load_recipe

RECIPES = Path(__file__).parents[2] / "jetspec" / "recipes"


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    data = "" if text.startswith("data:") else "data: [a.jsonl]\n"
    path.write_text(f"out: runs/x\n{data}{text}")
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
        ("optimizer: {learning: 1}\n", "unknown setting optimizer.learning; known are optimizer.kind, optimizer.lr,"),
        ("lr: 3\n", "unknown setting lr; did you mean optimizer.lr?"),
        ("learning_rate: 3\n", "unknown setting learning_rate; did you mean optimizer.lr?"),
        ("head: {lr: 3}\n", "unknown setting head.lr; did you mean optimizer.lr?"),
        ("loss: {gama: 3}\n", "unknown setting loss.gama; did you mean loss.gamma?"),
        ("kind: muon\n", "unknown setting kind; did you mean head.kind or loss.kind or optimizer.kind?"),
        ("head: {kinds: block}\n", "unknown setting head.kinds; did you mean head.kind?"),
        ("loss: {kind: l2}\n", "loss.kind is 'l2'; choose one of forward_kl"),
        ("steps: many\n", "steps is 'many'; expected int"),
        ("steps: true\n", "steps is True; expected int"),
        ("steps: 0\n", "steps is 0"),
        ("loss: {gamma: 0}\n", "loss.gamma is 0.0; it must be positive and finite, or null"),
        ("parallel: zero\n", "parallel is 'zero'; choose one of ddp, fsdp"),
        ("compile: sometimes\n", "compile is 'sometimes'; expected bool"),
        ("anchors_at_once: 0\n", "anchors_at_once is 0; it must be at least 1"),
        ("loss: 3\n", "loss must be a group"),
        ("minutes: 0\n", "minutes is 0.0; it must be positive and finite, or null"),
        ("minutes: .nan\n", "minutes is nan; it must be positive"),
        ("score: maybe\n", "score is 'maybe'; expected bool"),
        ("data: [3]\n", "data is 3; expected str"),
        ("data: [{path: a.jsonl, time: 2}]\n", "unknown setting data.time; did you mean data.times?"),
        ("data: [{path: a.jsonl, times: 0}]\n", "data.times is 0; it must be at least 1"),
        ("data: [{times: 2}]\n", "the recipe lacks data.path"),
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas must have 2 values"),
        ("train_only_edge: true\n", "needs an edge term"),
        ("train_only_edge: true\nhead: {edge_rank: 4}\n", "needs a finished head: name it with start"),
        ("a: [\n", "not valid YAML"),
        ("steps: 5\nsteps: 6\n", "steps is given twice, again in line 4"),
        ("head: {causal: true, causal: false}\n", "causal is given twice"),
        ("head: {num_layers: 0}\n", "head.num_layers is 0; it must be at least 1"),
        ("head: {block_size: 1}\n", "head.block_size is 1; it must be at least 2"),
        ("head: {block_size: 2000}\n", "head.block_size is 2000; trees are at most 1023 deep"),
        ("head: {tap_layers: []}\n", "head.tap_layers is empty"),
        ("head: {tap_layers: [-1]}\n", "head.tap_layers is -1"),
        ("head: {mask_token: -1}\n", "head.mask_token is -1"),
        ("head: {edge_rank: -1}\n", "head.edge_rank is -1"),
        ("head: {inner_size: 0}\n", "head.inner_size is 0; it must be at least 1"),
        ("validation_rows: -1\n", "validation_rows is -1; it must be at least 0"),
        ("optimizer: {clip: 0}\n", "optimizer.clip is 0.0; it must be positive"),
        ("optimizer: {clip: .nan}\n", "optimizer.clip is nan"),
        ("loss: {temperature: .nan}\n", "loss.temperature is nan"),
        ("optimizer: {lr: -1}\n", "optimizer.lr is -1.0; it must be positive"),
        ("optimizer: {lr: .inf}\n", "optimizer.lr is inf"),
        ("optimizer: {weight_decay: -5}\n", "optimizer.weight_decay is -5.0; it must be at least 0"),
        ("optimizer: {weight_decay: .nan}\n", "optimizer.weight_decay is nan"),
        ("optimizer: {betas: [0.9, 1]}\n", "optimizer.betas has 1.0; each must be at least 0 and below 1"),
        ("optimizer: {betas: [.nan, 0.9]}\n", "optimizer.betas has nan"),
        ("score: true\nvalidation_rows: 0\n", "set validation_rows, or leave score out"),
        ("data: []\n", "data is empty; name at least one file"),
        ("optimizer: {warmup_frac: 1.5}\n", "optimizer.warmup_frac is 1.5; it must be from 0 to 1"),
        ("optimizer: {final_lr_frac: -1}\n", "optimizer.final_lr_frac is -1.0"),
        ("keep: 0\n", "keep is 0; it must be at least 1"),
        ("seed: -1\n", "seed is -1; it must be at least 0"),
        ("on_bad: ignore\n", "on_bad is 'ignore'; choose one of stop, skip"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["007", "010", "0o7", "0x10", "0b1", "1_000", "1:30", "+-1", "1e", "١"])
def test_what_is_no_decimal_number_stays_as_it_is_written(tmp_path: Path, text: str) -> None:
    """YAML takes some of these for numbers, and others than they seem to be."""
    assert load_recipe(recipe(tmp_path, f"start: {text}\n")).start == text
    for wrong in (f"seed: {text}\n", f"minutes: {text}\n"):
        with pytest.raises(ValueError, match=r"expected (int|float)"):
            load_recipe(recipe(tmp_path, wrong))
        with pytest.raises(ValueError, match=r"expected (int|float)"):
            load_recipe(recipe(tmp_path, ""), (wrong.strip().replace(": ", "="),))


@pytest.mark.parametrize("text", ["1", "1.5", "1e-3", "1E3", "2.", ".5", "6e-4", "0.5", "+3", "10e+2"])
def test_decimal_numbers_are_numbers(tmp_path: Path, text: str) -> None:
    assert load_recipe(recipe(tmp_path, f"minutes: {text}\n")).minutes == float(text)


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


@pytest.mark.parametrize("override", ["head=[1", "head={a: b: c}"])
def test_an_override_that_is_no_yaml_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match="the value of head is not valid YAML") as caught:
        load_recipe(recipe(tmp_path, ""), (override,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_a_block_head_names_its_mask_token(path: Path) -> None:
    head = load_recipe(path).head
    assert head.mask_token is not None or head.kind == "eagle3"
