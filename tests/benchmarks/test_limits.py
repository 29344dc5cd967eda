"""Limits are kept, broken or not measured, according to the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.limits import check_limits, limits
from jetspec.models.hub import DEFAULT_MODEL
from tests.benchmarks.run_folders import read_table
from tests.benchmarks.tiny_bench import invoke


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Records just within every limit."""
    common = {"batch": 1, "temperature": 0.0, "ratio_plain": 1.1, "idle_frac": 0.02}
    dense = [
        {"budget": budget, "context": context, "round_ms": 5.0, "ratio_round": ratio, **common}
        for context, ratio in {256: 1.1, 2048: 1.2, 8192: 1.35}.items()
        for budget in (64, 128)
    ]
    edge = [{**run, "round_ms": 5.25} for run in dense]
    sparse = [{"budget": 64, "context": 256, "round_ms": 6.0, "read_round_ms": 4.0, **common}]
    small = [{"budget": budget, "context": 256, **common} for budget in (32, 64, 128)]
    sets = [{"set": s, "budget": b, "mistakes": 0} for b in (1, 32) for s in ("gsm8k", "humaneval", "mt_bench")]
    sizes = [(batch, budget) for budget in (1, 16, 32, 64, 128) for batch in (1, 2, 4, 8, 16, 32, 64)]
    cells = [{"batch": batch, "budget": budget, "mistakes": 0} for batch, budget in sizes]
    best = {"a": 2.5, "b": 9.0}
    texts = {"prompts": 1000, "batch": 32, "budget": 64, "mistakes": 0}
    soak = {"rounds": 10_000, "problems": [], "caches_compared": 1, "cancelled": 1, "preempted": 1}
    found: dict[str, dict[str, Any]] = {
        "profile_qwen3_8b": profiled("qwen3-8b", dense),
        "profile_qwen3_8b_edge": profiled("qwen3-8b", edge, edge_rank=128),
        "profile_qwen3_30b_a3b": profiled("qwen3-30b-a3b", sparse),
        "profile_smollm2": profiled(DEFAULT_MODEL, small) | {"weights": "real"},
        "engine_speed": checked({"bfloat16": {"best_speedup": best, "runs": sets}}),
        "engine_batches": checked({"bfloat16": {"best_speedup": best, "runs": cells}, "float32": {"runs": cells}}),
        "engine_soak": checked({"float32": soak}),
        "engine_strict": checked(dict.fromkeys(("float32", "bfloat16"), texts)),
    }
    made = {"commit": "0123456789", "hardware": {"gpu": "a GPU"}, "device": "cuda"}
    for name, record in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made | record))
    return tmp_path


def profiled(shape: str, runs: list[dict[str, Any]], edge_rank: int = 0) -> dict[str, Any]:
    head = {"name": shape, "layers": 5, "block_size": 16, "edge_rank": edge_rank}
    return {"shape": shape, "weights": "random", "dtype": "bfloat16", "head": head, "rounds": 200, "runs": runs}


def checked(results: dict[str, Any]) -> dict[str, Any]:
    return {"model": DEFAULT_MODEL, "head": DEFAULT_MODEL, "max_tokens": 256, "results": results}


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


def test_limits_that_are_just_kept_hold(records: Path) -> None:
    table, holds = check_limits(records)
    assert holds and len(rows := read_table(table)) == len(list(limits(records)))
    assert all((row["holds"], row["commit"]) == ("yes", "0123456") for row in rows)
    assert invoke("records", "--check", "--out", records).exit_code == 0


@pytest.mark.parametrize(
    ("name", "place", "value", "measured"),
    [
        ("profile_qwen3_8b", "runs.-1.ratio_round", 1.36, "1.36"),
        ("profile_qwen3_30b_a3b", "runs.0.round_ms", 6.4, "1.6"),
        ("profile_smollm2", "runs.0.idle_frac", 0.024, "0.024"),
        ("engine_batches", "results.bfloat16.runs.3.mistakes", 2, "2"),
        ("engine_soak", "results.float32.rounds", 9_999, "9,999"),
        ("engine_soak", "results.float32.problems", ["a page is lost"], "1"),
    ],
)
def test_a_broken_limit_does_not_hold(records: Path, name: str, place: str, value: Any, measured: str) -> None:
    set_in(records / f"{name}.json", place, value)
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
        ("engine_strict", "hardware", {"cpu": "a CPU"}, 2),
        ("engine_strict", "commit", "0123456789 with changes", 2),
        ("engine_strict", "commit", None, 2),
        ("engine_strict", "head", "another", 2),
        ("engine_strict", "max_tokens", None, 2),
        ("engine_strict", "results.float32.prompts", 999, 1),
        ("engine_strict", "results.bfloat16", None, 1),
        ("engine_batches", "results.float32", None, 1),
        ("engine_batches", "results.bfloat16.runs", [], 2),
        ("engine_speed", "results.bfloat16.runs", [], 2),
        ("engine_soak", "results.float32.cancelled", 0, 2),
        ("engine_soak", "results.float32.preempted", None, 2),
        ("profile_qwen3_8b", "rounds", 199, 10),
        ("profile_qwen3_8b", "dtype", "float32", 10),
        ("profile_qwen3_8b", "weights", "real", 10),
        ("profile_qwen3_8b", "head.layers", 1, 10),
        ("profile_qwen3_8b", "commit", "another", 2),
        ("profile_qwen3_8b_edge", "hardware", {"gpu": "another GPU"}, 2),
        ("profile_qwen3_8b_edge", "head.edge_rank", 0, 2),
        ("profile_qwen3_30b_a3b", "runs.0.batch", 2, 1),
        ("profile_qwen3_30b_a3b", "runs.0.temperature", 1.0, 1),
        ("profile_smollm2", "head.name", "another", 1),
        ("profile_smollm2", "runs", [], 1),
    ],
)
def test_a_record_of_another_setting_does_not_count(
    records: Path, name: str, place: str, value: Any, rows: int
) -> None:
    set_in(records / f"{name}.json", place, value)
    found = [row["measured"] for row in read_table(check_limits(records)[0]) if row["holds"] == "no"]
    assert len(found) == rows and all(text.startswith("not measured: ") for text in found)
