"""A tiny target, its heads and questions, for all that measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots
from jetspec.engine.llm import LLM
from tests.benchmarks.tiny_bench import write_setup


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / "model", device="cpu")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are empty, which takes no time."""
    monkeypatch.setattr(plots, "draw_svg", lambda *_: "<svg />")
