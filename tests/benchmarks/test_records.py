"""One command makes every record of the performance page; limits are kept, broken or not measured according to them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import engine, records
from benchmarks.pages import PAGES
from benchmarks.records import NAMES, check_limits, limits
from benchmarks.results import RESULTS_FILE
from benchmarks.run import read_plan, run
from jetspec.commands.app import app
from jetspec.record import module_command
from tests.benchmarks.run_folders import read_table
from tests.benchmarks.tiny_bench import invoke

HERE = {"cpu": "this CPU", "gpu": "this GPU"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands, which are not run: each leaves a record of this commit, except those of edge terms, which fail."""
    commands: list[list[str]] = []

    def instead(words: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(words[2:])
        if "head.edge_rank=128" in words:
            return subprocess.CompletedProcess(words, 1)
        made = Path(words[words.index("--out") + 1])
        made = made if made.suffix else made / RESULTS_FILE
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(record_of(words[2:])))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "this GPU")
    monkeypatch.setattr(records, "current_commit", lambda: "this")
    monkeypatch.setattr(records, "hardware", lambda: HERE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return commands


def record_of(words: Sequence[str]) -> dict[str, Any]:
    device = words[words.index("--device") + 1]
    about = {"commit": "this", "command": module_command(words), "device": device, "hardware": HERE}
    if "run" not in words:
        return about
    recipe = {"head": None, "max_tokens": 256}
    return {**about, "date": "today", "versions": {}, "model": "a model", "recipe": recipe, "cells": []}


def test_all_records_of_the_page_and_the_limits_are_made(tmp_path: Path) -> None:
    shown = set(PAGES["docs/results/engine.md"]) - {"limits"}
    assert set(records.NAMES) == {limit.record for limit in records.limits(tmp_path)} | shown


def test_commands_have_the_options_that_they_are_given(tmp_path: Path) -> None:
    for name in records.NAMES:
        for program, first, *words in records.commands(name, tmp_path, tmp_path / "record.json", "cpu"):
            if program == "jetspec":
                refused = CliRunner().invoke(app, [first, *words, "--rounds", "0"])
                assert refused.exit_code == 2 and "rounds" in refused.output
                continue
            single = typer.Typer()
            single.command()({"run": run, "soak": engine.soak}[first])
            options = {option for param in typer.main.get_command(single).params for option in param.opts}
            assert {word for word in words if word.startswith("--")} <= options
            assert first != "run" or read_plan(Path(words[0]), {})


def test_records_of_this_commit_are_kept(ran: list[list[str]], tmp_path: Path) -> None:
    names = "engine_soak", "engine_strict", "profile_qwen3_8b"
    (soak,), strict, _ = (records.commands(name, tmp_path, tmp_path / "elsewhere", "cuda") for name in names)
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(soak)))
    (tmp_path / "engine_strict.json").write_text(json.dumps(record_of(strict[0]) | {"commit": "another"}))
    asked = "records", "--data", tmp_path, "--out", tmp_path, *names
    assert invoke(*asked).exit_code == 0
    assert ran[:2] == strict and [command[:3] for command in ran[2:]] == [["jetspec", "profile", "--shape"]]
    assert list(json.loads((tmp_path / "engine_strict.json").read_text())["results"]) == ["bfloat16", "float32"]
    assert invoke(*asked).exit_code == 0 and len(ran) == 3
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(soak) | {"holds": False}))
    done = invoke(*asked)
    assert done.exit_code == 1 and "engine_soak" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "python -m benchmarks soak --rounds 80 --out engine_soak.json"},
        {"unfinished": ["bfloat16"], "holds": False},
        {"device": "cpu"},
        {"hardware": {"cpu": "this CPU", "gpu": "another GPU"}},
        {"commit": "this with changes"},
    ],
    ids=str,
)
def test_a_record_of_another_command_machine_or_source_is_made_again(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(records, "current_commit", lambda: changes.get("commit", "this"))
    (words,) = records.commands("engine_soak", tmp_path, tmp_path / "engine_soak.json", "cuda")
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(words) | changes))
    assert invoke("records", "--data", tmp_path, "--out", tmp_path, "engine_soak").exit_code == 0
    assert ran == [words]


def test_without_a_gpu_nothing_is_measured_unless_requested(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = "records", "--data", tmp_path, "--out", tmp_path, "engine_soak", "profile_smollm2"
    assert invoke(*asked).exit_code == 2 and ran == []
    assert invoke(*asked, "--device", "cpu").exit_code == 0
    assert [command[command.index("--device") + 1] for command in ran] == ["cpu", "cpu"]


def test_a_failure_does_not_stop_the_others(ran: list[list[str]], tmp_path: Path) -> None:
    done = invoke("records", "--data", tmp_path, "--out", tmp_path / "new")
    assert done.exit_code == 1 and "profile_qwen3_8b_edge" in done.stderr and len(ran) == len(records.NAMES) + 2
    assert invoke("records", "--data", tmp_path, "--out", tmp_path, "x").exit_code == 2


# -- limits

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The published records, which keep every limit."""
    for name in NAMES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return tmp_path


def set_in(path: Path, place: str, value: Any) -> None:
    """Set a value of a record by its keys; None removes it."""
    record = json.loads(path.read_text())
    *above, last = place.split(".")
    inner = record
    for key in above:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(record))


def test_published_records_keep_every_limit(published: Path) -> None:
    table, holds = check_limits(published)
    assert holds and len(rows := read_table(table)) == len(list(limits(published)))
    assert all(row["holds"] == "yes" and len(row["commit"]) == 7 for row in rows)
    assert invoke("records", "--check", "--out", published).exit_code == 0


@pytest.mark.parametrize(
    ("name", "place", "kept", "broken", "measured"),
    [
        ("profile_qwen3_8b", "runs.-1.ratio_round", 1.35, 1.36, "1.36"),
        ("profile_qwen3_8b", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("profile_smollm2", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("engine_speed", "results.bfloat16.runs.0.tokens_per_s", 3600.0, 4000.0, "2.29"),
        ("engine_batches", "results.bfloat16.runs.3.mistakes", 0, 2, "2"),
        ("engine_soak", "results.float32.rounds", 10_000, 9_999, "9,999"),
        ("engine_soak", "results.float32.problems", [], ["a page is lost"], "1"),
    ],
)
def test_a_limit_holds_up_to_its_bound(
    published: Path, name: str, place: str, kept: Any, broken: Any, measured: str
) -> None:
    set_in(published / f"{name}.json", place, kept)
    assert check_limits(published)[1]
    set_in(published / f"{name}.json", place, broken)
    table, holds = check_limits(published)
    assert [row["measured"] for row in read_table(table) if row["holds"] == "no"] == [measured] and not holds
    assert invoke("records", "--check", "--out", published).exit_code == 1


def test_a_missing_record_does_not_hold(published: Path) -> None:
    (published / "engine_speed.json").unlink()
    set_in(published / "profile_qwen3_30b_a3b.json", "runs.0.context", 512)
    rows = read_table(check_limits(published)[0])
    assert [row["measured"][:12] for row in rows if row["holds"] == "no"] == ["not measured"] * 3


@pytest.mark.parametrize(
    ("name", "place", "value", "rows"),
    [
        ("engine_strict", "device", "cpu", 2),
        ("engine_strict", "commit", "0123456789 with changes", 2),
        ("engine_strict", "head", "another", 2),
        ("engine_strict", "max_tokens", None, 2),
        ("engine_strict", "results.float32.prompts", 999, 1),
        ("engine_batches", "results.float32", None, 1),
        ("engine_batches", "results.bfloat16.runs", [], 2),
        ("engine_soak", "results.float32.cancelled", 0, 2),
        ("profile_qwen3_8b", "rounds", 199, 10),
        ("profile_qwen3_8b", "dtype", "float32", 10),
        ("profile_qwen3_8b", "head.layers", 1, 10),
        ("profile_qwen3_8b", "commit", "another", 2),
        ("profile_qwen3_8b_edge", "hardware", {"gpu": "another GPU"}, 2),
        ("profile_qwen3_8b_edge", "head.edge_rank", 0, 2),
        ("profile_qwen3_30b_a3b", "runs.0.batch", 2, 1),
        ("profile_qwen3_30b_a3b", "runs.0.temperature", 1.0, 1),
        ("profile_smollm2", "head.name", "another", 1),
    ],
)
def test_a_record_of_another_setting_does_not_count(
    published: Path, name: str, place: str, value: Any, rows: int
) -> None:
    set_in(published / f"{name}.json", place, value)
    found = [row["measured"] for row in read_table(check_limits(published)[0]) if row["holds"] == "no"]
    assert len(found) == rows and all(text.startswith("not measured: ") for text in found)
