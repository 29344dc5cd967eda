"""Scores: what is graded, how often and where, and runs that are graded later, on another machine."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grade import Grade
from benchmarks.recipe import BenchConfig
from benchmarks.run import ungraded
from jetspec.engine.llm import LLM
from tests.benchmarks.tiny_bench import invoke, make_bench, results_of, write_questions


def test_scores_are_those_of_the_grader_and_equal_texts_are_graded_once(folder: Path, llm: LLM) -> None:
    write_questions(folder, "gsm8k", [[f"{i} and {i} is"] for i in range(5)])
    graded: list[tuple[str, str]] = []

    def grader(task: str, question: Mapping[str, Any], text: str) -> Grade:
        assert task == "gsm8k"
        graded.append((question["id"], text))
        right = {"0": True, "1": False, "2": True}.get(question["answer"])
        return Grade(right, is_partial=question["answer"] == "1")

    def missing(task: str, question: Mapping[str, Any], text: str) -> Grade:
        raise ValueError("grading needs a package")

    bench = make_bench(folder, "graded", llm, tasks=["gsm8k", "sums"], repeats=2)
    rows = bench.run()
    ungraded = results_of(bench, rows, missing)
    assert all(cell["score"] is None for cell in ungraded["cells"])
    assert ungraded["ungraded"] == ["gsm8k is not graded: grading needs a package"] and not ungraded["notes"]
    scores = scores_of(results_of(bench, rows, grader))
    firsts = [row["answers"][0] for (cell, repeat, _), row in rows.items() if (cell.method, repeat) == ("plain", 0)]
    cut = sum(one["finish"] == ["length"] for one in firsts if one["id"] in ("gsm8k-0", "gsm8k-1", "gsm8k-2"))
    expected = {"correct": 2, "graded": 3, "share": pytest.approx(2 / 3), "partial": 1, "cut": cut}
    expected |= {"right": ["gsm8k-0", "gsm8k-2"], "wrong": ["gsm8k-1"]}
    assert scores["plain", "gsm8k"] == scores["ngram", "gsm8k"] == expected
    assert scores["plain", "sums"] is None
    assert len(graded) == len(set(graded)) == 5


def test_programs_are_graded_several_at_a_time_and_mathematics_in_the_main_thread(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("gsm8k", "mbpp"):
        write_questions(folder, task, [[f"{i} and {i} is"] for i in range(4)])
    both = threading.Barrier(2, timeout=30)
    graded: list[str] = []

    def grader(task: str, question: Mapping[str, Any], text: str) -> Grade:
        is_main = threading.current_thread() is threading.main_thread()
        assert is_main == (task == "gsm8k")
        if task == "mbpp":
            both.wait()
        graded.append(question["id"])
        return Grade(True)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    bench = make_bench(folder, "together", llm, tasks=["gsm8k", "mbpp"], methods=["ngram"], repeats=1)
    cells = results_of(bench, grader=grader)["cells"]
    assert len(cells) == 4 and all(cell["score"]["correct"] == 4 for cell in cells)
    assert sorted(graded) == sorted(f"{task}-{i}" for task in ("gsm8k", "mbpp") for i in range(4))


def test_missing_graders_are_named_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig(tasks=("gsm8k", "mt_bench", "aime25"))
    assert list(ungraded(config)) == []
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert [text.split(":")[0] for text in ungraded(config)] == ["no scores of gsm8k, aime25"]
    assert [text.split(":")[0] for text in ungraded(BenchConfig())] == ["no scores of builtin"], "some are as of gsm8k"
    assert list(ungraded(BenchConfig(tasks=("mt_bench",)))) == []


# -- runs that are graded later


def measure(folder: Path, out: Path, *words: str) -> dict[str, Any]:
    """A run of two tasks that have graders and one that has none, as its record."""
    write_questions(folder, "gsm8k", [[f"{i} and {i} is"] for i in range(3)])
    write_questions(folder, "mbpp", [["Your code should pass these tests:\nassert double(2) == 4"]] * 2)
    where = ["--model", str(folder / "model"), "--data-dir", str(folder / "eval"), "--device", "cpu"]
    done = invoke("run", *where, "--tasks", "gsm8k,mbpp,sums", "-n", "6", "-r", "2", "--out", str(out), *words)
    assert done.exit_code == 0, done.output
    return read(out)


def read(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "results.json").read_text()))


def scores_of(record: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    return {(cell["method"], cell["task"]): cell["score"] for cell in record["cells"]}


def without_scores(record: Mapping[str, Any]) -> dict[str, Any]:
    cells = [{key: value for key, value in cell.items() if key != "score"} for cell in record["cells"]]
    return {key: value for key, value in {**record, "cells": cells}.items() if key not in ("graded", "ungraded")}


def test_answers_are_graded_later_on_another_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no plots are made here
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "math_verify", None)
        before = measure(folder, tmp_path / "run")
        still = invoke("grade", str(tmp_path / "run"), "--data-dir", str(folder / "eval"))
        assert still.exit_code == 1 and "gsm8k is not graded" in " ".join(still.stderr.split())
        assert scores_of(read(tmp_path / "run")) == scores_of(before)
    there = scores_of(before)
    assert there["plain", "gsm8k"] is None and there["plain", "mbpp"] is not None
    done = invoke("grade", str(tmp_path / "run"), "--data-dir", str(folder / "eval"), "--report")
    assert done.exit_code == 0 and "is not graded" not in done.stderr, done.output
    after = read(tmp_path / "run")
    assert scores_of(after) == scores_of(measure(folder, tmp_path / "graded"))
    assert after["ungraded"] == [] and without_scores(after) == without_scores(before)
    assert set(after["graded"]) == {"command", "date", "commit", "versions"}
    assert "graded later" in (tmp_path / "run" / "report" / "report.md").read_text()
    shown = invoke("report", str(tmp_path / "graded"), "--out", str(tmp_path / "other"))
    assert not shown.exit_code and "graded later" not in (tmp_path / "other" / "report.md").read_text()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run, data: (data / "gsm8k.jsonl").write_text('{"id": "a", "turns": ["b"]}\n'), "are not those that"),
        (lambda run, data: (data / "gsm8k.jsonl").unlink(), "gsm8k"),
        (lambda run, data: (run / "rows.jsonl").write_text(""), "has no answers of plain on gsm8k"),
        (lambda run, data: (run / "run.json").unlink(), "it has no run.json"),
        (lambda run, data: (run / "results.json").write_text('{"cells": []}'), "holds no answers"),
    ],
)
def test_a_run_that_cannot_be_graded_is_status_2(folder: Path, tmp_path: Path, spoil: Any, why: str) -> None:
    run, data = tmp_path / "run", tmp_path / "eval"
    measure(folder, run, "--methods", "plain", "--limit", "1")
    data.mkdir()
    for file in (folder / "eval").iterdir():
        (data / file.name).write_text(file.read_text())
    spoil(run, data)
    held = {file: file.read_bytes() for file in run.iterdir()}
    done = invoke("grade", str(run), "--data-dir", str(data))
    assert done.exit_code == 2 and why in " ".join(done.stderr.split()) and done.stdout == ""
    assert {file: file.read_bytes() for file in run.iterdir()} == held
