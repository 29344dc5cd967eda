"""What a benchmark found is in the docs as its record says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_page
from benchmarks.pages import marks
from tests.benchmarks.run_folders import make_run


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take longest, and are looked at in `tests/benchmarks/test_report.py`."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def put(monkeypatch: pytest.MonkeyPatch, run: Path, out: Path, page: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["bench_page", str(run), "--out", str(out), "--page", str(page)])
    bench_page.main()
    return page.read_text()


def test_record_report_and_table_go_to_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", batches=(1,), budgets=(16, 64))
    page, out = tmp_path / "docs" / "page.md", tmp_path / "docs" / "results" / "bench_small"
    page.parent.mkdir()
    begin, end = marks("bench_small")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    text = put(monkeypatch, run, out, page)
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "Temperature 0, batch 1:" in text and "Temperature 1, batch 1:" in text and "Commit 0123456" in text
    assert "from 2026-01-01 00:00:00 to 2026-01-01 00:20:00 UTC" in text
    rows = [line for line in text.splitlines() if line.startswith("| jetspec-edge")]
    report = (out / "report.md").read_text()
    assert len(rows) == 2 and all(row in report for row in rows)
    assert (page.parent / "results/bench_small/report.md").exists() and "(results/bench_small/report.md)" in text
    assert (out / "results.json").read_text() == (run / "results.json").read_text()
    assert put(monkeypatch, out, out, page) == text, "written anew from what is in the docs"


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, page = make_run(tmp_path / "run", batches=(1,)), tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(ValueError, match="lacks the marks"):
        put(monkeypatch, run, tmp_path / "out", page)
    assert page.read_text() == "text\n" and not (tmp_path / "out").exists()


def test_all_commits_that_measured_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, page = make_run(tmp_path / "run", batches=(1,)), tmp_path / "page.md"
    record = json.loads((run / "results.json").read_text())
    record["runs"].append({**record["runs"][0], "commit": f"{'89abcdef' * 5} with changes"})
    (run / "results.json").write_text(json.dumps(record))
    page.write_text("\n".join(marks("out")))
    assert "Commit 0123456, 89abcde with changes, from" in put(monkeypatch, run, tmp_path / "out", page)
