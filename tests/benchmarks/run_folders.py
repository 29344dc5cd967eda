"""Run folders and records as `jetspec bench`, `eval-head` and `profile` write them, with made-up numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.estimate import Estimate, to_record
from benchmarks.recipe import KINDS, BenchConfig, Cell, MethodConfig
from benchmarks.results import Result
from jetspec.train.choices import Reliability
from jetspec.train.evaluate import HeadScore

DEPTH = 15
QUALITY = {"ngram": 0.3, "dflash": 0.6, "ddtree": 0.66, "jetspec-paper": 0.68, "jetspec": 0.7, "jetspec-edge": 0.74}
"""Chance that a draft token is accepted."""
FIXED = {name: kind.budgets for name, kind in KINDS.items() if kind.budgets}
"""Budgets of methods that do not follow the recipe."""
TASKS = ("gsm8k", "humaneval", "mt_bench")
GRADED = ("gsm8k", "math500", "humaneval", "mbpp")
TIE = {"turn": 0, "position": 17, "gap": 0.0312, "least": 0.0312, "moved": 0.0, "tie": True, "why": None}
RIGHT, WRONG = [f"question-{i}" for i in range(12)], [f"question-{i}" for i in range(12, 40)]


def read_table(markdown: str) -> list[dict[str, str]]:
    """Rows of a table by name of column."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip(" *") for cell in line] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def make_run(
    folder: Path,
    *,
    methods: Sequence[str] = ("plain", "transformers", "ngram", "dflash", "ddtree", "jetspec-paper", "jetspec-edge"),
    tasks: Sequence[str] = TASKS,
    temperatures: Sequence[float] = (0.0, 1.0),
    budgets: Sequence[int] = (16, 64, 256),
    batches: Sequence[int] = (1, 8),
    repeats: int = 3,
    model: str = "smollm2-135m-instruct",
    gpu: str = "NVIDIA H200",
    noise: float = 0.02,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write results.json. `changes` goes into every cell."""
    rng = random.Random(0)
    cells = [
        {**make_cell(rng, Cell(method, task, temperature, budget, batch), repeats, noise), **(changes or {})}
        for temperature, batch, task, method in product(temperatures, batches, tasks, methods)
        for budget in FIXED.get(method, budgets)
    ]
    began = {"command": "python -m jetspec bench recipe.yaml", "date": "2026-01-01T00:00:00+00:00", "commit": "0123456"}
    record = {
        **began,
        "date": "2026-01-01T00:20:00+00:00",
        "runs": [began],
        "hardware": {"cpu": "A processor", "gpu": gpu},
        "versions": {"python": "3.11", "torch": "2.11"},
        "model": model,
        "dtype": "bfloat16",
        "noise": {"steps": 0.1, "trees": 0.25, "positions": 512, "widest_tie": 0.25},
        "notes": [],
        "recipe": make_recipe(methods, budgets) | {"model": model, "max_tokens": 128, "repeats": repeats},
        "cells": cells,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record))
    return folder


def make_recipe(methods: Sequence[str], budgets: Sequence[int]) -> dict[str, Any]:
    """Recipe of a run's record, in the paper's mode."""
    kinds = {name: name if name in KINDS else "ngram" for name in methods}
    chosen = [MethodConfig(name, kind, head="a head" if KINDS[kind].head else None) for name, kind in kinds.items()]
    config = BenchConfig(methods=tuple(chosen), budgets=tuple(budgets), thinking=False)
    return json.loads(json.dumps(config.to_dict(chosen)))


def make_result(cell: Cell) -> Result:
    return Result.read(make_cell(random.Random(0), cell))


def make_cell(rng: random.Random, cell: Cell, repeats: int = 3, noise: float = 0.02) -> dict[str, Any]:
    method, task, temperature, budget, batch = asdict(cell).values()
    alpha = QUALITY.get(method, 0.0) + 0.03 * ((budget or 16).bit_length() - 6) - 0.05 * temperature
    alpha -= {"mt_bench": 0.08}.get(task, 0)
    accepted = [0] * (DEPTH + 1)
    for _ in range(200 if method in QUALITY else 0):
        length = 0
        while length < DEPTH and rng.random() < alpha:
            length += 1
        accepted[length] += 1
    rounds = sum(accepted)
    per_round = 1 + sum(a * n for a, n in enumerate(accepted)) / rounds if rounds else 1.0
    cost = 1.15 + (budget or 1) * batch / 900 if method in QUALITY else {"transformers": 3.0}.get(method, 1.0)
    values = [250 * batch**0.8 * per_round / cost * rng.gauss(1, noise) for _ in range(repeats)]
    wobble = 0.2 if method == "ngram" else noise
    ratios = [per_round / cost * rng.gauss(1, wobble) for _ in range(repeats)]
    speedup = make_speedup([1.0] if method == "plain" else ratios)
    greedy = temperature == 0
    missed = [{"id": f"{task}-00003", "repeats": [0, 2], **TIE}] if method == "ddtree" and greedy else []
    counts = {"compared": 40, "identical": 40 - len(missed), "ties": len(missed), "different": missed}
    lossless = {"check": "greedy tokens" if greedy else "seeded tokens", **counts}
    score = {"correct": 12, "graded": 40, "share": 0.3, "partial": 0, "cut": 3, "right": RIGHT, "wrong": WRONG}
    return {
        **asdict(cell),
        "questions": 40,
        "together": batch,
        "tokens": 4096,
        "tokens_per_s": to_record(values),
        "tokens_per_round": make_rounds(per_round, repeats if method != "transformers" else 0),
        "accepted": accepted if rounds else [],
        "prefill_s": {"mean": 0.02, "sd": 0.001, "values": [0.02] * repeats},
        "speedup": speedup,
        "speedup_transformers": {**make_speedup([3 * value for value in speedup["values"]]), "over": "transformers"},
        "score": score if task in GRADED else None,
        "lossless": lossless if method != "plain" and (greedy or method != "transformers") else None,
        "errors": [],
    }


def make_rounds(per_round: float, repeats: int) -> dict[str, Any]:
    """Of four questions with ten rounds each, which differ a little."""
    questions = [[10 * per_round * share, 10] for share in (0.98, 0.99, 1.01, 1.02)] if repeats else []
    return {**to_record([per_round] * repeats), "questions": questions}


def make_speedup(values: Sequence[float]) -> dict[str, Any]:
    found = Estimate.of_ratios(values)
    assert found is not None
    differs = found.differs_from_1()
    asked = {"se_questions": None, "num_questions": 0}
    return {"over": "plain", "mean": found.mean, "sd": found.sd, **asked, "values": list(values), "differs": differs}


def make_head_record(path: Path, mean_gap: float = 4.0) -> Path:
    rng = random.Random(1)
    gaps = torch.tensor([rng.gauss(mean_gap, 3) for _ in range(64)])
    task = HeadScore({"16": [[2, 1]]}, torch.zeros(8, 3, dtype=torch.long), gaps, width=8).to_dict()
    trees = {"chain": 3.1, "16": 3.4, "64": 4.0}
    record = {
        "command": "python -m jetspec eval-head",
        "date": "2026-01-01",
        "commit": "0123456",
        "hardware": {"cpu": "A processor"},
        "versions": {},
        "model": "smollm2-135m-instruct",
        "head": "mine",
        "tokens_per_round": {"gsm8k": trees, "mbpp": trees},
        "mean": trees,
        "details": {"gsm8k": task, "mbpp": task},
        "sampled": {"temperature 1": {"without": 2.0, "with": 3.0, "reliability": Reliability.of([]).to_dict()}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def make_profile_record(path: Path, contexts: Sequence[int]) -> Path:
    stages = {"draft": 0.98, "build": 0.02, "verify": 5.0, "accept": 0.02, "commit": 0.1}
    record = {
        "command": "python -m jetspec profile",
        "hardware": {"gpu": "NVIDIA H200"},
        "shape": "qwen3-8b",
        "head": {"block_size": 17},
        "runs": [{"budget": 64, "context": context, "batch": 1, "stages_ms": stages} for context in contexts],
    }
    path.write_text(json.dumps(record))
    return path
