"""One command makes every record of the performance page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import engine, limits, records
from benchmarks.pages import PAGES
from jetspec.commands.app import app
from jetspec.record import module_command
from tests.benchmarks.tiny_bench import invoke

HERE = {"cpu": "this CPU", "gpu": "this GPU"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands, which are not run: each leaves a record of this commit, except those of edge terms, which fail."""
    commands: list[list[str]] = []

    def instead(words: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(words[2:])
        if "head.edge_rank=128" in words:
            return subprocess.CompletedProcess(words, 1)
        Path(words[words.index("--out") + 1]).write_text(json.dumps(record_of(words[2:])))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr(records, "current_commit", lambda: "this")
    monkeypatch.setattr(records, "hardware", lambda: HERE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return commands


def record_of(words: Sequence[str]) -> dict[str, Any]:
    device = words[words.index("--device") + 1]
    return {"commit": "this", "command": module_command(words), "device": device, "hardware": HERE}


def test_all_records_of_the_page_and_the_limits_are_made(tmp_path: Path) -> None:
    shown = set(PAGES["docs/results/engine.md"]) - {"limits"}
    assert set(records.NAMES) == {limit.record for limit in limits.limits(tmp_path)} | shown


def test_commands_have_the_options_that_they_are_given(tmp_path: Path) -> None:
    group: Any = typer.main.get_command(engine.app)
    single = typer.Typer()
    single.command()(engine.soak)
    known: Any = {**group.commands, "soak": typer.main.get_command(single)}
    for name in records.CHECKS:
        words = list(records.command(name, tmp_path, tmp_path / "record.json", "cpu"))[1:]
        command = known[words.pop(1) if words[0] == "engine" else words[0]]
        options = {option for param in command.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options
    for name in records.PROFILES:
        _, *words = records.command(name, tmp_path, tmp_path / "record.json", "cpu")
        refused = CliRunner().invoke(app, [*words, "--rounds", "0"])
        assert refused.exit_code == 2 and "rounds" in refused.output


def test_records_of_this_commit_are_kept(ran: list[list[str]], tmp_path: Path) -> None:
    names = "engine_soak", "engine_strict", "profile_qwen3_8b"
    soak, strict, _ = (records.command(name, tmp_path, tmp_path / "elsewhere", "cuda") for name in names)
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(soak)))
    (tmp_path / "engine_strict.json").write_text(json.dumps(record_of(strict) | {"commit": "another"}))
    asked = "records", "--data", tmp_path, "--out", tmp_path, *names
    assert invoke(*asked).exit_code == 0
    assert [command[:3] for command in ran] == [["benchmarks", "engine", "strict"], ["jetspec", "profile", "--shape"]]
    assert invoke(*asked).exit_code == 0 and len(ran) == 2
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
    words = records.command("engine_soak", tmp_path, tmp_path / "engine_soak.json", "cuda")
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
    assert done.exit_code == 1 and "profile_qwen3_8b_edge" in done.stderr and len(ran) == len(records.NAMES)
    assert invoke("records", "--data", tmp_path, "--out", tmp_path, "x").exit_code == 2
