"""Records say which commit made them."""

from __future__ import annotations

from pathlib import Path

import pytest

import jetspec.record as module
from jetspec.record import current_commit


def test_a_copy_without_history_may_name_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "jetspec"
    package.mkdir()
    monkeypatch.setattr(module, "__file__", str(package / "record.py"))
    assert current_commit() is None
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert current_commit() == "0123abc"
