"""One command makes every record that the page of the engine's speed is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import check_engine, engine_limits, engine_records
from benchmarks.engine_page import PAGES
from jetspec.commands.app import app
from jetspec.record import module_command


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_records", *map(str, words)])
    engine_records.main()


HERE = {"cpu": "this CPU", "gpu": "this GPU"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands, which are not run: each leaves a record of this commit, but for those of edge terms, which fail."""
    commands: list[list[str]] = []

    def instead(words: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(words[2:])
        path = Path(words[words.index("--out") + 1])
        if "--edge" in words:
            return subprocess.CompletedProcess(words, 1)
        path.write_text(json.dumps(record_of(words[2:])))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr(engine_records, "current_commit", lambda: "this")
    monkeypatch.setattr(engine_records, "hardware", lambda: HERE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return commands


def record_of(words: Sequence[str]) -> dict[str, Any]:
    device = words[words.index("--device") + 1]
    return {"commit": "this", "command": module_command(words), "device": device, "hardware": HERE}


def test_all_that_the_page_shows_and_the_limits_ask_for_is_made(tmp_path: Path) -> None:
    asked = {limit.record for limit in engine_limits.limits(tmp_path)} | set(PAGES["performance.md"])
    assert set(engine_records.NAMES) == asked


@pytest.mark.parametrize("name", engine_records.CHECKS)
def test_checks_are_asked_for_with_options_that_they_have(name: str, tmp_path: Path) -> None:
    _, *words = engine_records.command(name, tmp_path, tmp_path / "record.json", "cpu")
    args = check_engine.parse(words)
    assert args.data == tmp_path and args.out == tmp_path / "record.json" and args.device == "cpu"


@pytest.mark.parametrize("name", engine_records.PROFILES)
def test_profiles_are_asked_for_with_options_that_they_have(name: str, tmp_path: Path) -> None:
    _, *words = engine_records.command(name, tmp_path, tmp_path / "record.json", "cpu")
    refused = CliRunner().invoke(app, [*words, "--rounds", "0"])
    assert "rounds is 0" in f"{refused.exception} {refused.output}"


def test_what_is_of_this_commit_stays_and_the_rest_is_made(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "engine_soak", "engine_strict", "profile_qwen3_8b"
    soak, strict, _ = (engine_records.command(name, tmp_path, tmp_path / "elsewhere", "cuda") for name in names)
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(soak)))
    (tmp_path / "engine_strict.json").write_text(json.dumps(record_of(strict) | {"commit": "another"}))
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *names)
    assert [command[:2] for command in ran] == [["benchmarks.check_engine", "strict"], ["jetspec", "profile"]]
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *names)
    assert len(ran) == 2
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(soak) | {"holds": False}))
    with pytest.raises(SystemExit, match="engine_soak"):
        run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *names)


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "python -m benchmarks.check_engine soak --rounds 80 --out engine_soak.json"},
        {"unfinished": ["bfloat16"], "holds": False},
        {"device": "cpu"},
        {"hardware": {"cpu": "this CPU"}},
        {"hardware": {"cpu": "this CPU", "gpu": "another GPU"}},
    ],
    ids=str,
)
def test_what_another_command_or_machine_made_is_made_anew(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    words = engine_records.command("engine_soak", tmp_path, tmp_path / "engine_soak.json", "cuda")
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(words) | changes))
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, "engine_soak")
    assert ran == [words]


def test_what_a_changed_source_made_is_made_anew(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = "this with changes"
    monkeypatch.setattr(engine_records, "current_commit", lambda: changed)
    words = engine_records.command("engine_soak", tmp_path, tmp_path / "engine_soak.json", "cuda")
    (tmp_path / "engine_soak.json").write_text(json.dumps(record_of(words) | {"commit": changed}))
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, "engine_soak")
    assert ran == [words]


def test_without_a_gpu_nothing_is_measured_unless_asked_for(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    where = "--data", tmp_path, "--out", tmp_path, "engine_soak", "profile_smollm2"
    with pytest.raises(SystemExit):
        run(monkeypatch, *where)
    assert ran == [] and "there is no GPU here" in capsys.readouterr().err
    run(monkeypatch, *where, "--device", "cpu")
    assert [command[command.index("--device") + 1] for command in ran] == ["cpu", "cpu"]


def test_after_one_that_fails_the_others_are_made(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="profile_qwen3_8b_edge"):
        run(monkeypatch, "--data", tmp_path, "--out", tmp_path / "new")
    assert len(ran) == len(engine_records.NAMES)


@pytest.mark.parametrize(("words", "said"), [(["--data", "nowhere"], "no folder nowhere"), (["x"], "is called x")])
def test_what_cannot_be_is_told(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *words)
    assert said in capsys.readouterr().err
