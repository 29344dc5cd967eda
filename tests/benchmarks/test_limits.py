"""Limits are kept, broken or not measured, according to the records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.limits import check_limits, limits
from benchmarks.records import NAMES
from tests.benchmarks.run_folders import read_table
from tests.benchmarks.tiny_bench import invoke

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """The published records, which keep every limit."""
    for name in NAMES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return tmp_path


def set_in(path: Path, place: str, value: Any) -> None:
    """Set a value of a record by its keys; None removes it."""
    record = json.loads(path.read_text())
    *above, last = place.split(".")
    inner = record
    for key in above:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(record))


def test_published_records_keep_every_limit(records: Path) -> None:
    table, holds = check_limits(records)
    assert holds and len(rows := read_table(table)) == len(list(limits(records)))
    assert all(row["holds"] == "yes" and len(row["commit"]) == 7 for row in rows)
    assert invoke("records", "--check", "--out", records).exit_code == 0


@pytest.mark.parametrize(
    ("name", "place", "kept", "broken", "measured"),
    [
        ("profile_qwen3_8b", "runs.-1.ratio_round", 1.35, 1.36, "1.36"),
        ("profile_qwen3_8b", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("profile_smollm2", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("engine_speed", "results.bfloat16.best_speedup.gsm8k", 2.5, 2.4, "2.4"),
        ("engine_batches", "results.bfloat16.runs.3.mistakes", 0, 2, "2"),
        ("engine_soak", "results.float32.rounds", 10_000, 9_999, "9,999"),
        ("engine_soak", "results.float32.problems", [], ["a page is lost"], "1"),
    ],
)
def test_a_limit_holds_up_to_its_bound(
    records: Path, name: str, place: str, kept: Any, broken: Any, measured: str
) -> None:
    set_in(records / f"{name}.json", place, kept)
    assert check_limits(records)[1]
    set_in(records / f"{name}.json", place, broken)
    table, holds = check_limits(records)
    assert [row["measured"] for row in read_table(table) if row["holds"] == "no"] == [measured] and not holds
    assert invoke("records", "--check", "--out", records).exit_code == 1


def test_a_missing_record_does_not_hold(records: Path) -> None:
    (records / "engine_speed.json").unlink()
    set_in(records / "profile_qwen3_30b_a3b.json", "runs.0.context", 512)
    rows = read_table(check_limits(records)[0])
    assert [row["measured"][:12] for row in rows if row["holds"] == "no"] == ["not measured"] * 3


@pytest.mark.parametrize(
    ("name", "place", "value", "rows"),
    [
        ("engine_strict", "device", "cpu", 2),
        ("engine_strict", "commit", "0123456789 with changes", 2),
        ("engine_strict", "head", "another", 2),
        ("engine_strict", "max_tokens", None, 2),
        ("engine_strict", "results.float32.prompts", 999, 1),
        ("engine_batches", "results.float32", None, 1),
        ("engine_batches", "results.bfloat16.runs", [], 2),
        ("engine_soak", "results.float32.cancelled", 0, 2),
        ("profile_qwen3_8b", "rounds", 199, 10),
        ("profile_qwen3_8b", "dtype", "float32", 10),
        ("profile_qwen3_8b", "head.layers", 1, 10),
        ("profile_qwen3_8b", "commit", "another", 2),
        ("profile_qwen3_8b_edge", "hardware", {"gpu": "another GPU"}, 2),
        ("profile_qwen3_8b_edge", "head.edge_rank", 0, 2),
        ("profile_qwen3_30b_a3b", "runs.0.batch", 2, 1),
        ("profile_qwen3_30b_a3b", "runs.0.temperature", 1.0, 1),
        ("profile_smollm2", "head.name", "another", 1),
    ],
)
def test_a_record_of_another_setting_does_not_count(
    records: Path, name: str, place: str, value: Any, rows: int
) -> None:
    set_in(records / f"{name}.json", place, value)
    found = [row["measured"] for row in read_table(check_limits(records)[0]) if row["holds"] == "no"]
    assert len(found) == rows and all(text.startswith("not measured: ") for text in found)
