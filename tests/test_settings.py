"""Settings are strict: an error names the setting, and the nearest known one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path

import pytest

from jetspec.config import BatchTree, EngineConfig, TreeConfig
from jetspec.settings import describe_settings, from_dict, parse_overrides, read_settings, read_yaml, updated


@dataclass(frozen=True)
class Rate:
    lr: float = 0.1
    """Learning rate,
    per step."""
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Run:
    name: str
    steps: int = 5
    """Updates."""
    minutes: float | None = None
    start: str | None = None
    rate: Rate = field(default_factory=Rate)
    tree: TreeConfig = field(default_factory=TreeConfig)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stepz: 5", ["stepz", "did you mean steps?"]),
        ("lr: 3", ["lr", "did you mean rate.lr?"]),
        ("learning_rate: 3", ["learning_rate", "did you mean rate.lr?"]),
        ("rate: {steps: 1}", ["rate.steps", "did you mean steps?"]),
        ("rate: {qqq: 1}", ["rate.qqq", "rate.lr, rate.betas"]),
        ("rate: 3", ["rate"]),
        ("rate: {betas: [0.9]}", ["rate.betas", "2"]),
        ("steps: many", ["steps", "'many'", "int"]),
        ("steps: true", ["steps", "int"]),
        ("steps: 5\nsteps: 6", ["steps", "line 2"]),
        ("tree: {expand: best}", ["tree.expand", "'best'", "optimal", "paper"]),
        ("a: [", ["not valid YAML"]),
        ("steps: 5", ["name"]),
    ],
)
def test_errors_name_the_setting(text: str, names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        from_dict(Run, read_yaml(text, "here"))
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["007", "0o7", "0x10", "1_000", "1:30", "1e", "١"])
def test_numbers_are_decimal(text: str) -> None:
    """YAML reads some of these as numbers, and others than they seem to be."""
    assert updated(Run("a"), parse_overrides([f"start={text}"])).start == text
    for name in ("steps", "minutes"):
        with pytest.raises(ValueError, match=name):
            updated(Run("a"), parse_overrides([f"{name}={text}"]))


@pytest.mark.parametrize("text", ["1", "1.5", "1e-3", "1E3", "2.", ".5", "+3"])
def test_numbers_of_every_decimal_form_are_read(text: str) -> None:
    assert updated(Run("a"), parse_overrides([f"minutes={text}"])).minutes == float(text)


def test_overrides_change_single_settings() -> None:
    run = Run("a", rate=Rate(betas=(0.1, 0.2)), tree=TreeConfig(width=3))
    changed = updated(
        run, parse_overrides(["rate.lr=1e-3", "tree.budget=8", "tree.batch_trees=8:4,24:2:1", "steps=6", "steps=7"])
    )
    assert changed.rate == Rate(1e-3, (0.1, 0.2)) and changed.steps == 7
    assert changed.tree == TreeConfig(8, 3, batch_trees=(BatchTree(8, 4), BatchTree(24, 2, 1)))
    assert parse_overrides(["rate.lr=1", "rate.betas=[1, 2]"]) == {"rate": {"lr": 1, "betas": [1, 2]}}


@pytest.mark.parametrize("override", ["steps", "rate=[1", "steps.x=3", "tree.budgets=3", "tree.budget=0"])
def test_wrong_overrides_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match=override.partition("=")[0].rpartition(".")[2]):
        updated(Run("a"), parse_overrides([override]))


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfsteps: 3\n")
    assert read_settings(path) == {"steps": 3}
    with pytest.raises(ValueError, match="none"):
        read_settings(tmp_path / "none.yaml")


def test_descriptions_come_from_the_fields() -> None:
    found = {each.path: each for each in describe_settings(Run)}
    assert found["name"].default is MISSING and found["steps"].help == "Updates."
    assert found["rate.lr"].help == "Learning rate, per step." and found["rate.betas"].default == (0.9, 0.95)
    assert found["minutes"].type == "float or null" and found["tree.expand"].type == "optimal|paper"
    for config in (TreeConfig, EngineConfig):
        assert all(each.help for each in describe_settings(config))


def test_settings_are_checked_without_torch() -> None:
    """Wrong values are answered before the seconds that torch takes to load."""
    modules = "jetspec.settings, jetspec.config, jetspec.train.config, jetspec.data.prompts, jetspec.data.config"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
