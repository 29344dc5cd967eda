from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kernel_choices
from benchmarks.kernel_choices import CASES, missing_cases, read_results
from jetspec.record import write_record


def test_a_record_is_continued_by_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    assert read_results(path) == []
    first = CASES[0]
    result = {"shape": first.shape, "batch": first.batch, "nodes": first.nodes, "context": first.context}
    write_record(path, {"cases": [result]})
    (found,) = read_results(path)
    assert missing_cases([found]) == CASES[1:]
    monkeypatch.setattr(kernel_choices, "SAME", ("cases",))
    monkeypatch.setattr(kernel_choices, "make_record", lambda results: {"cases": None})
    assert read_results(path) == []
