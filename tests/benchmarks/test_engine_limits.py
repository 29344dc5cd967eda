"""Limits are kept, broken or not measured as the records say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_limits
from benchmarks.pages import marks
from jetspec.models.hub import DEFAULT_MODEL


def write_records(folder: Path) -> None:
    """Just within every limit, and of just what is asked for."""
    ratios = {256: 1.1, 2048: 1.2, 8192: 1.35}
    common = {"batch": 1, "temperature": 0.0, "ratio_plain": 1.1, "idle_frac": 0.02}
    dense = [
        {"budget": budget, "context": context, "round_ms": 5.0, "ratio_round": ratio, **common}
        for context, ratio in ratios.items()
        for budget in (64, 128)
    ]
    edge = [{**run, "round_ms": 5.25} for run in dense]
    sparse = [{"budget": 64, "context": 256, "round_ms": 6.0, "read_round_ms": 4.0, **common}]
    small = [{"budget": budget, "context": 256, **common} for budget in (32, 64, 128)]
    sets = [
        {"set": name, "budget": budget, "mistakes": 0}
        for budget in (1, 32)
        for name in ("gsm8k", "humaneval", "mt_bench")
    ]
    cells = [
        {"batch": batch, "budget": budget, "mistakes": 0}
        for budget in (1, 16, 32, 64, 128)
        for batch in (1, 2, 4, 8, 16, 32, 64)
    ]
    best = {"a": 2.5, "b": 9.0}
    texts = {"prompts": 1000, "batch": 32, "budget": 64, "mistakes": 0}
    soak = {"rounds": 10_000, "problems": [], "caches_compared": 1, "cancelled": 1, "preempted": 1}
    records: dict[str, dict[str, Any]] = {
        "profile_qwen3_8b": profiled("qwen3-8b", dense),
        "profile_qwen3_8b_edge": profiled("qwen3-8b", edge, edge_rank=128),
        "profile_qwen3_30b_a3b": profiled("qwen3-30b-a3b", sparse),
        "profile_smollm2": profiled(DEFAULT_MODEL, small) | {"weights": "real"},
        "engine_speed": checked({"bfloat16": {"best_speedup": best, "runs": sets}}),
        "engine_batches": checked({"bfloat16": {"best_speedup": best, "runs": cells}, "float32": {"runs": cells}}),
        "engine_soak": checked({"float32": soak}),
        "engine_strict": checked(dict.fromkeys(("float32", "bfloat16"), texts)),
    }
    for name, record in records.items():
        made = {"commit": "0123456789", "hardware": {"gpu": "a GPU"}, "device": "cuda"}
        (folder / f"{name}.json").write_text(json.dumps(made | record))


def profiled(shape: str, runs: list[dict[str, Any]], edge_rank: int = 0) -> dict[str, Any]:
    head = {"name": shape, "layers": 5, "block_size": 16, "edge_rank": edge_rank}
    return {"shape": shape, "weights": "random", "dtype": "bfloat16", "head": head, "rounds": 200, "runs": runs}


def checked(results: dict[str, Any]) -> dict[str, Any]:
    return {"model": DEFAULT_MODEL, "head": DEFAULT_MODEL, "max_tokens": 256, "results": results}


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


def set_in(path: Path, place: str, value: Any) -> None:
    """A value of a record, by its keys; None takes it away."""
    record = json.loads(path.read_text())
    *above, last = place.split(".")
    inner = record
    for key in above:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
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
        ("profile_smollm2", {"idle_frac": 0.024}, "| 0.024 | no |"),
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


@pytest.mark.parametrize(
    ("name", "place", "value", "rows", "missing"),
    [
        ("engine_strict", "device", "cpu", 2, "a GPU"),
        ("engine_strict", "hardware", {"cpu": "a CPU"}, 2, "a GPU"),
        ("engine_strict", "commit", "0123456789 with changes", 2, "a commit without changes"),
        ("engine_strict", "commit", None, 2, "a commit without changes"),
        ("engine_strict", "model", "another", 2, "SmolLM2 with its own head"),
        ("engine_strict", "head", "another", 2, "SmolLM2 with its own head"),
        ("engine_strict", "max_tokens", 64, 2, "256 tokens"),
        ("engine_strict", "max_tokens", None, 2, "256 tokens"),
        ("engine_strict", "results.float32.prompts", 999, 1, "1,000 prompts in float32"),
        ("engine_strict", "results.bfloat16", None, 1, "1,000 prompts in bfloat16, batch 32, budget 64"),
        ("engine_strict", "results.bfloat16.batch", 8, 1, "batch 32"),
        ("engine_strict", "results.bfloat16.budget", 16, 1, "budget 64"),
        ("engine_batches", "results.float32", None, 1, "every batch size with every budget in float32"),
        ("engine_batches", "results.bfloat16.runs", [], 2, "every batch size with every budget in bfloat16"),
        ("engine_speed", "results.bfloat16.runs", [], 2, "gsm8k, humaneval, mt_bench in bfloat16"),
        ("engine_soak", "results.float32.caches_compared", 0, 2, "caches compared"),
        ("engine_soak", "results.float32.cancelled", 0, 2, "cancels"),
        ("engine_soak", "results.float32.preempted", None, 2, "preemptions"),
        ("profile_qwen3_8b", "device", "cpu", 10, "a GPU"),
        ("profile_qwen3_8b", "rounds", 199, 10, "200 rounds"),
        ("profile_qwen3_8b", "dtype", "float32", 10, "bfloat16"),
        ("profile_qwen3_8b", "shape", "qwen3-0.6b", 10, "random weights of qwen3-8b"),
        ("profile_qwen3_8b", "weights", "real", 10, "random weights of qwen3-8b"),
        ("profile_qwen3_8b", "head.layers", 1, 10, "a head of 5 layers and 16 slots"),
        ("profile_qwen3_8b", "head.block_size", 8, 10, "a head of 5 layers and 16 slots"),
        ("profile_qwen3_8b", "head.edge_rank", 128, 10, "a head without an edge term"),
        ("profile_qwen3_8b", "commit", "another", 2, "both of one commit and machine"),
        ("profile_qwen3_8b_edge", "hardware", {"gpu": "another GPU"}, 2, "both of one commit and machine"),
        ("profile_qwen3_8b_edge", "head.edge_rank", 0, 2, "an edge term"),
        ("profile_qwen3_30b_a3b", "rounds", 10, 1, "200 rounds"),
        ("profile_qwen3_30b_a3b", "head.layers", 1, 1, "a head of 5 layers and 16 slots"),
        ("profile_smollm2", "head.name", "another", 1, "its own head"),
        ("profile_smollm2", "weights", "random", 1, f"real weights of {DEFAULT_MODEL}"),
        ("profile_smollm2", "runs", [], 1, "32 nodes after 256 tokens"),
    ],
)
def test_a_run_of_something_else_tells_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    place: str,
    value: Any,
    rows: int,
    missing: str,
) -> None:
    write_records(tmp_path)
    set_in(tmp_path / f"{name}.json", place, value)
    assert run(monkeypatch, "--records", tmp_path) == 1
    told = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines() if "not measured" in row]
    assert len(told) == rows and all(f"| not measured: {missing} | no |" in row for row in told)


@pytest.mark.parametrize(
    ("changes", "missing"), [({"batch": 2}, "batch 1"), ({"temperature": 1.0}, "greedy rounds")], ids=str
)
def test_rounds_of_something_else_tell_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, float],
    missing: str,
) -> None:
    write_records(tmp_path)
    change(tmp_path / "profile_qwen3_30b_a3b.json", **changes)
    assert run(monkeypatch, "--records", tmp_path) == 1
    assert capsys.readouterr().out.count(f"not measured: {missing} ") == 1


def test_the_page_says_what_the_records_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = tmp_path / "performance.md"
    page.write_text((docs / "performance.md").read_text())
    run(monkeypatch, "--records", docs / "results", "--page", page)
    assert page.read_text() == (docs / "performance.md").read_text()
