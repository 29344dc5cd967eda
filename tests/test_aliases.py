"""Old names work for one release, each with one warning."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest

import jetspec
from jetspec import aliases
from jetspec.config import BatchTree, EngineConfig, TreeConfig


@pytest.fixture(autouse=True)
def no_warning_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_warned", set())


@pytest.mark.parametrize(
    ("section", "config", "old", "value"),
    [
        ("tree", TreeConfig(), "heat", 0.5),
        ("tree", TreeConfig(), "likely", 3),
        ("tree", TreeConfig(), "shrink", (BatchTree(8, 32),)),
        ("engine", EngineConfig(), "patience", 4),
        ("engine", EngineConfig(), "ahead", 1),
    ],
)
def test_config_accepts_old_field_names(section: str, config: Any, old: str, value: object) -> None:
    new = aliases.RENAMED[section][old]
    with pytest.warns(FutureWarning, match=f"{old} .*{new}") as given:
        made = type(config)(**{old: value})
    assert [warning.filename for warning in given] == [__file__]
    with warnings.catch_warnings(action="error"):  # once per name
        assert made == type(config)(**{new: value}) == replace(config, **{old: value})
        assert getattr(made, old) == value


def test_every_field_alias_names_a_field() -> None:
    for section, config in (("tree", TreeConfig), ("engine", EngineConfig)):
        assert set(aliases.RENAMED[section].values()) <= {field.name for field in fields(config)}


def test_old_public_names_are_the_new_objects() -> None:
    for old, new in aliases.RENAMED["python"].items():
        with pytest.warns(FutureWarning, match=f"{old} .*{new}"):
            assert getattr(jetspec, old) is getattr(jetspec, new)
        assert old not in dir(jetspec)


def test_keys_of_a_file_are_renamed_with_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        given = aliases.renamed({"budget": 8, "heat": 0.5, "draft_temperature": 1.0}, "tree", where="recipe.yaml")
        assert given == {"budget": 8, "draft_temperature": 0.5}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "recipe.yaml" in lines[0] and "draft_temperature" in lines[0]
