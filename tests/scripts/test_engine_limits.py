"""Limits are kept, broken or not measured as the records say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import engine_limits
from scripts.pages import marks


def write_records(folder: Path) -> None:
    """Just within every limit."""
    ratios = {256: 1.1, 2048: 1.2, 8192: 1.35}
    common = {"ratio_plain": 1.1, "idle_frac": 0.02}
    dense = [
        {"budget": budget, "context": context, "round_ms": 5.0, "ratio_round": ratio, **common}
        for context, ratio in ratios.items()
        for budget in (64, 128)
    ]
    edge = [{**run, "round_ms": 5.25} for run in dense]
    speeds: dict[str, Any] = {
        "results": {
            "float32": {"runs": [{"mistakes": 0}]},
            "bfloat16": {"best_speedup": {"a": 2.5, "b": 9.0}, "runs": [{"mistakes": 0}, {"mistakes": 0}]},
        }
    }
    records = {
        "profile_qwen3_8b": {"runs": dense},
        "profile_qwen3_8b_edge": {"runs": edge},
        "profile_qwen3_30b_a3b": {"runs": [{"budget": 64, "context": 256, "round_ms": 6.0, "read_round_ms": 4.0}]},
        "engine_speed": speeds,
        "engine_batches": speeds,
        "engine_soak": {"results": {"float32": {"rounds": 10_000, "problems": []}}},
        "engine_strict": {"results": {dtype: {"mistakes": 0} for dtype in ("float32", "bfloat16")}},
    }
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps({**record, "commit": "0123456789"}))


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["engine_limits", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        engine_limits.main()
    return int(ended.value.code or 0)


def change(path: Path, **changes: Any) -> None:
    """Of the last run, or of the first result if that has none."""
    record = json.loads(path.read_text())
    place = record if "runs" in record else next(iter(record["results"].values()))
    (place["runs"][-1] if "runs" in place else place).update(changes)
    path.write_text(json.dumps(record))


def test_what_is_just_kept_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path)
    assert run(monkeypatch, "--records", tmp_path) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(list(engine_limits.limits(tmp_path)))
    assert all("| yes |" in " ".join(row.split()) and "0123456" in row for row in rows)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("profile_qwen3_8b", {"ratio_round": 1.36}, "| 1.36 | no |"),
        ("profile_qwen3_8b", {"idle_frac": 0.021}, "| 0.021 | no |"),
        ("profile_qwen3_30b_a3b", {"round_ms": 6.4}, "| 1.6 | no |"),
        ("engine_speed", {"mistakes": 1}, "| 1 | no |"),
        ("engine_batches", {"mistakes": 2}, "| 2 | no |"),
        ("engine_soak", {"rounds": 9_999}, "| 9,999 | no |"),
        ("engine_soak", {"problems": ["a page is lost"]}, "| 1 | no |"),
    ],
)
def test_what_is_broken_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, float], said: str
) -> None:
    write_records(tmp_path)
    change(tmp_path / f"{name}.json", **changes)
    page = tmp_path / "page.md"
    page.write_text("\n".join(marks("limits")))
    assert run(monkeypatch, "--records", tmp_path, "--page", page) == 1
    lines = [" ".join(line.split()) for line in page.read_text().splitlines()]
    assert [said in line for line in lines].count(True) == 1 == ["| no |" in line for line in lines].count(True)


def test_what_nothing_tells_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path)
    (tmp_path / "engine_speed.json").unlink()
    change(tmp_path / "profile_qwen3_30b_a3b.json", context=512)
    assert run(monkeypatch, "--records", tmp_path) == 1
    assert capsys.readouterr().out.count("not measured") == 3


def test_the_page_says_what_the_records_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = tmp_path / "performance.md"
    page.write_text((docs / "performance.md").read_text())
    run(monkeypatch, "--records", docs / "results", "--page", page)
    assert page.read_text() == (docs / "performance.md").read_text()
