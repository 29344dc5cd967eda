"""Data that all tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.tiny_run import write_answers


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 answers."""
    return write_answers(tmp_path_factory.mktemp("data") / "answers.jsonl", 40)
