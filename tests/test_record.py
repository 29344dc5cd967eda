"""Records say which commit and which command made them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jetspec.record as module
from jetspec.record import current_command, current_commit, shown_head

ROOT = Path(__file__).parent.parent


def test_a_copy_without_history_names_its_commit_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "jetspec"
    package.mkdir()
    monkeypatch.setattr(module, "__file__", str(package / "record.py"))
    assert current_commit() is None
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert current_commit() == "0123abc"


def test_reading_the_commit_changes_no_file_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git would rewrite its index after a touch, under a lock that stays if git is killed."""
    (tmp_path / "jetspec").mkdir()
    source = tmp_path / "jetspec" / "record.py"
    source.write_text("")
    who = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(source, (1, 1))
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    monkeypatch.setattr(module, "__file__", str(source))
    commit = current_commit()
    assert commit is not None and len(commit) == 40
    assert index.read_bytes() == before


SHOW = "import json, sys; from jetspec.record import current_command; print(json.dumps([current_command(), sys.argv]))"


def test_a_recorded_command_runs_again_in_its_folder(tmp_path: Path) -> None:
    """The command names files relative to the folder where it ran."""
    home = tmp_path / "home"
    (home / "tool").mkdir(parents=True)
    (home / "tool" / "__main__.py").write_text(SHOW)
    words = ["--out", str(tmp_path / "far" / "out"), f"--methods=a={home / 'x'},b={home / 'y'}", "two words", "near/by"]

    def run(arguments: list[str]) -> tuple[str, list[Path]]:
        source = str(Path(module.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), source])}
        done = subprocess.run([sys.executable, *arguments], cwd=home, env=environment, capture_output=True, check=True)
        command, (_, *given) = json.loads(done.stdout)
        paths = [Path(home, part).resolve() for word in given for part in word.replace("=", ",").split(",")]
        return command, paths

    first, meant = run(["-m", "tool", *words])
    assert str(tmp_path) not in first
    name, *again = shlex.split(first)
    assert name == "python" and run(again) == (first, meant)


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        ("/some/bin/jetspec bench --quick", "jetspec bench --quick"),
        ("tools/mine.py bench", "python tools/mine.py bench"),
        ("jetspec --out=/elsewhere/made/a.json --work /elsewhere ../b", "jetspec --out=a.json --work elsewhere ../b"),
        ("jetspec --set 'data=[/elsewhere/made/a, /elsewhere/b, c]'", "jetspec --set 'data=[a, b, c]'"),
    ],
)
def test_commands_are_recorded_without_absolute_paths(
    words: str, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", shlex.split(words))
    assert current_command() == recorded


def test_no_committed_record_holds_an_absolute_path() -> None:
    """Records of earlier releases satisfy the rule as well."""
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        words = shlex.split(json.loads(path.read_text())["command"])
        assert [word for word in words if module._from_here(word) != word] == [], path.name


@pytest.mark.parametrize(
    ("path", "name"),
    [("/home/me/edge/head", "edge/head"), ("/head", "head"), ("runs/bench/edge/head", "runs/bench/edge/head")],
)
def test_a_head_is_shown_with_its_folder(path: str, name: str) -> None:
    assert shown_head(path) == name


def test_versions_name_graders_without_importing_them() -> None:
    make = "import json, sys; from jetspec.record import make_record; print(json.dumps(make_record({})['versions']))"
    check = "assert not {'math_verify', 'latex2sympy2_extended', 'datasets'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{make}; {check}"], cwd=ROOT, capture_output=True, check=True)
    assert {"torch", "math-verify", "latex2sympy2-extended", "sympy"} <= set(json.loads(done.stdout))


@pytest.mark.parametrize("runs", [True, False])
def test_hardware_names_mps(runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if runs:
        os.mkfifo(tmp_path / "control")
    assert module.hardware().get("mps") == (True if runs else None) and module.hardware()["gpu"] == "a GPU"
