"""A benchmark small enough for a test: a random model on disk, heads of every kind, a folder of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks import measure
from benchmarks.__main__ import app
from benchmarks.grade import grade
from benchmarks.measure import Bench
from benchmarks.methods import Ask, Method, Reply, Timed, open_method
from benchmarks.recipe import BenchConfig, MethodConfig
from benchmarks.rows import Key, Row
from benchmarks.run_record import Grader, Results
from jetspec.engine.llm import LLM
from jetspec.models.head_format import save_head
from jetspec.settings import from_dict
from tests.engine.tiny import tiny_head
from tests.train.tiny_model import write_model

Change = Callable[[Reply], Reply | str]


def write_setup(folder: Path) -> Path:
    """A model, heads and questions: the folder."""
    model = write_model(folder / "model")
    target = LLM(model, drafter="none").target.decoder
    heads = {"causal": tiny_head(target), "edge": tiny_head(target, edge=True)}
    heads["bidirectional"] = tiny_head(target, causal=False)
    for name, head in heads.items():
        save_head(head, folder / name, torch.float32)
    (folder / "eval").mkdir()
    write_questions(folder, "sums", [[f"{i} and {i} is"] for i in range(5)])
    write_questions(folder, "talk", [["hello", "and then?"], ["why", "really?"]])
    return folder


def write_questions(folder: Path, task: str, turns: list[list[str]]) -> None:
    rows = [{"id": f"{task}-{i}", "turns": said, "answer": str(i)} for i, said in enumerate(turns)]
    (folder / "eval" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_bench(folder: Path, run: str = "run", llm: LLM | None = None, **changes: Any) -> Bench:
    usual = {"data_dir": str(folder / "eval"), "tasks": ["sums"], "max_tokens": 8, "repeats": 2, "budgets": [6]}
    usual |= {"warmup": 2, "device": "cpu", "methods": ["ngram"]}
    config: BenchConfig = from_dict(BenchConfig, {"model": str(folder / "model"), **usual, **changes}, "")
    return Bench(config, llm or LLM(config.model, config.head, dtype=config.dtype, device="cpu"), folder / run)


def results_of(bench: Bench, rows: dict[Key, Row] | None = None, grader: Grader = grade) -> dict[str, Any]:
    return Results(bench, bench.run() if rows is None else rows, grader).record()


def without_times(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells, less what a clock says."""
    timed = ("tokens_per_s", "prefill_s", "speedup", "speedup_transformers")
    return [{key: value for key, value in cell.items() if key not in timed} for cell in results["cells"]]


class Meddler:
    """A method that does what it is told and then changes its replies."""

    def __init__(self, inner: Method, change: Change) -> None:
        self.inner, self.change = inner, change

    def warm_up(self, asks: Sequence[Ask]) -> None:
        pass

    def decode(self, asks: Sequence[Ask]) -> Timed:
        timed = self.inner.decode(asks)
        return replace(timed, replies=[r if isinstance(r, str) else self.change(r) for r in timed.replies])


def meddle(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let every method but the plain one change its replies."""

    def open_meddler(llm: LLM, method: MethodConfig, *args: Any, **options: Any) -> Method:
        opened = open_method(llm, method, *args, **options)
        return opened if method.name == "plain" else Meddler(opened, change)

    monkeypatch.setattr(measure, "open_method", open_meddler)


def invoke(*words: object) -> Result:
    """Run a command of `python -m benchmarks` in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])
