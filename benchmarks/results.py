"""The one reader of finished measurements: folders of runs, and the records of other commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.estimate import Estimate, how_many
from benchmarks.recipe import PLAIN, Cell, with_new_keys

Record = Mapping[str, Any]
RESULTS_FILE, ROWS_FILE, RUN_FILE = "results.json", "rows.jsonl", "run.json"
FEW_REPEATS = 3
"""Fewer repeats leave even large differences within chance."""
PARTIAL_MARK = "*"
"""Behind scores of fewer tests than a task is known for."""
PARTIAL_NOTE = (
    f"{PARTIAL_MARK} Questions without tests, graded by the calls in their docstrings: higher than published scores, "
    "and only good for comparing methods."
)


@dataclass(frozen=True)
class Score:
    """Right answers among those that have a grader."""

    correct: int
    graded: int
    partial: int
    """Answers graded by fewer tests than the task is known for."""
    cut: int
    """Answers that reached the limit of tokens."""
    right: frozenset[str]
    """Questions answered correctly."""
    wrong: frozenset[str]

    @property
    def share(self) -> Estimate:
        """Share of right answers, with its standard error by Laplace's rule."""
        p = (self.correct + 1) / (self.graded + 2)
        error = math.sqrt(p * (1 - p) / (self.graded + 3))
        return Estimate(self.correct / self.graded, error, error)

    @property
    def mark(self) -> str:
        return PARTIAL_MARK if self.partial else ""

    @classmethod
    def read(cls, raw: Record) -> Score:
        questions = frozenset(raw["right"]), frozenset(raw["wrong"])
        return cls(raw["correct"], raw["graded"], raw["partial"], raw["cut"], *questions)


@dataclass(frozen=True)
class Lossless:
    """Texts beside those of plain decoding. A gap is the distance of two tokens in the target's logits."""

    check: str
    """Greedy tokens, seeded tokens, or greedy text."""
    compared: int
    identical: int
    ties: int
    """Texts that differ only where rounding decided between two tokens."""
    different: tuple[Record, ...]

    @classmethod
    def read(cls, raw: Record) -> Lossless:
        return cls(raw["check"], raw["compared"], raw["identical"], raw["ties"], tuple(raw["different"]))

    @property
    def mistakes(self) -> int:
        """Texts that differ where the target was decided."""
        return self.compared - self.identical - self.ties

    @property
    def widest_gap(self) -> float | None:
        return max((d["gap"] for d in self.different if d["gap"] is not None), default=None)


@dataclass(frozen=True)
class Result(Cell):
    """Measurements of one method on one task with one setting."""

    questions: int
    together: int
    """Most questions decoded together: less than the batch where there were not enough."""
    tokens: int
    tokens_per_s: Estimate | None
    """None: every answer failed."""
    tokens_per_round: Estimate | None
    """Over all rounds, with its standard error over questions. None: rounds were not counted."""
    accepted: tuple[int, ...]
    """Rounds by accepted length, from 0."""
    prefill_s: Estimate | None
    speedup: Estimate | None
    """Over plain decoding."""
    speedup_transformers: Estimate | None
    score: Score | None
    lossless: Lossless | None
    errors: tuple[Record, ...]
    """Answers that failed: `id`, `repeat`, `error`."""

    @classmethod
    def read(cls, raw: Record) -> Result:
        rounds = raw["tokens_per_round"]
        read: dict[str, Any] = {
            **{name: Estimate.of(raw[name]["values"]) for name in ("tokens_per_s", "prefill_s")},
            "tokens_per_round": Estimate.of_parts(rounds["questions"], rounds.get("ids") or ()),
            **{name: Estimate.read_ratios(raw[name]) for name in ("speedup", "speedup_transformers")},
            "accepted": tuple(raw["accepted"]),
            "score": Score.read(raw["score"]) if raw["score"] else None,
            "lossless": Lossless.read(raw["lossless"]) if raw["lossless"] else None,
            "errors": tuple(raw["errors"]),
        }
        return cls(**read, **{f.name: raw[f.name] for f in fields(cls) if f.name not in read})

    @property
    def key(self) -> Cell:
        """Setting that two runs must share for their results to be comparable."""
        return Cell(self.method, self.task, self.temperature, self.budget, self.batch)

    @property
    def failed(self) -> set[tuple[str, int]]:
        """Question and repeat of every answer that failed."""
        return {(error["id"], error["repeat"]) for error in self.errors}

    @property
    def is_plain(self) -> bool:
        return self.method == PLAIN

    @property
    def tree(self) -> int | None:
        """Most nodes of its trees. None: it drafts no trees."""
        return None if self.is_plain else self.budget

    @property
    def label(self) -> str:
        return self.method if self.tree is None else f"{self.method} {self.tree}"

    @property
    def batch_text(self) -> str:
        return str(self.batch) if self.together == self.batch else f"{self.together} of {self.batch}"

    @property
    def round_cost(self) -> float | None:
        """Time of a round in plain steps: its tokens over how much faster they came."""
        return self.tokens_per_round.mean / self.speedup.mean if self.tokens_per_round and self.speedup else None


@dataclass(frozen=True)
class Run:
    """A benchmark: its record and its cells."""

    name: str
    record: Record
    cells: tuple[Result, ...]

    @property
    def recipe(self) -> Record:
        return self.record.get("recipe") or {}

    @property
    def notes(self) -> list[str]:
        """Remarks that a reader of its tables needs."""
        own = [note for field in ("notes", "ungraded") for note in self.record.get(field) or ()]
        return [*own, *(self.recipe.get("notes") or ())]

    @property
    def widest_tie(self) -> float | None:
        """Distance of two tokens that rounding may exchange. None: no text gave reason to measure it."""
        return (self.record.get("noise") or {}).get("widest_tie")

    @property
    def model(self) -> str:
        return str(self.record.get("model") or self.recipe.get("model") or "unknown")

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def setting(self) -> str:
        """Model, device, questions and repeats in a line."""
        words = [self.model, *([str(self.record["dtype"])] if "dtype" in self.record else []), f"on {self.device}"]
        counts = {cell.questions for cell in self.cells}
        asked = how_many(max(counts), "question")
        parts = [(f"{min(counts)} to " if len(counts) > 1 else "") + f"{asked} per task"]
        if skip := self.recipe.get("skip"):
            parts[0] += skipped(skip, self.recipe.get("tasks") or ())
        if "max_tokens" in self.recipe:
            parts.append(f"at most {self.recipe['max_tokens']} tokens per answer")
        if "repeats" in self.recipe:
            parts.append(f"repeats: {self.recipe['repeats']}")
        return f"{' '.join(words)}; {', '.join(parts)}."

    @property
    def few_repeats(self) -> str | None:
        """Warning for numbers whose variation is hardly known."""
        repeats = min((len(cell.tokens_per_s.values) for cell in self.cells if cell.tokens_per_s), default=FEW_REPEATS)
        if repeats >= FEW_REPEATS:
            return None
        few = "once, so nothing says" if repeats == 1 else "twice, which says little of"
        return f"measured {few} how much its numbers vary. Use --repeats {FEW_REPEATS} or more."

    def method(self, name: str) -> Record | None:
        """Kind, trees and settings of a method. None: the record does not tell."""
        methods = self.recipe.get("methods") or ()
        return next((method for method in methods if method["name"] == name and "trees" in method), None)

    def cell(self, key: Cell) -> Result | None:
        return next((cell for cell in self.cells if cell.key == key), None)


def skipped(skip: int | Mapping[str, int], tasks: Iterable[str]) -> str:
    """Number of questions passed over, per task where they differ."""
    if not isinstance(skip, Mapping):
        return f" behind the first {skip}"
    by_count: dict[int, list[str]] = {}
    for task in tasks:
        by_count.setdefault(skip.get(task, 0), []).append(task)
    parts = [f"{count} of {', '.join(some)}" for count, some in by_count.items() if count]
    return f", behind the first {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class HeadRecord:
    name: str
    record: Record

    @property
    def mean(self) -> Mapping[str, float]:
        """Tokens per round over all tasks, by tree."""
        return {tree: float(value) for tree, value in self.record["mean"].items()}

    @property
    def tokens_per_round(self) -> Mapping[str, Mapping[str, float]]:
        """By task and tree."""
        tasks = self.record["tokens_per_round"].items()
        return {task: {tree: float(row[tree]) for tree in self.mean} for task, row in tasks}

    @property
    def gaps(self) -> list[float]:
        """log q - log p of top paths, of all tasks, in nats."""
        return [gap for task in self.record["details"].values() for gap in task["top_path"].get("gaps_nats", ())]


@dataclass(frozen=True)
class DraftCost:
    """Times of drafting and verifying at one setting."""

    context: int
    depth: int
    """Tokens drafted in a pass."""
    budget: int
    batch: int
    draft_ms: Estimate
    verify_ms: Estimate
    c_percent: Estimate
    """Cost of a drafted token, in percent of a verify pass."""


@dataclass(frozen=True)
class CostRecord:
    """Times of a run with `measure: costs`, or of `jetspec profile`."""

    name: str
    record: Record

    @property
    def model(self) -> str:
        return str(self.record["model"] if "costs" in self.record else self.record["shape"])

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def costs(self) -> list[DraftCost]:
        if "costs" in self.record:
            names = "draft_ms", "verify_ms", "c_percent"
            return [
                DraftCost(
                    *(raw["context"], raw["depth"], raw["depth"] + 1, 1),
                    *(Estimate(raw[name]["mean"], raw[name]["sd"]) for name in names),
                )
                for raw in self.record["costs"]
            ]
        depth = self.record["head"]["block_size"] - 1  # a block holds the token that is known, then drafts
        found = []
        for run in self.record["runs"]:
            draft, verify = run["stages_ms"]["draft"], run["stages_ms"]["verify"]
            times = map(Estimate, (draft, verify, 100 * draft / (depth * verify)))
            found.append(DraftCost(run["context"], depth, run["budget"], run["batch"], *times))
        return found


def commits_of(record: Record) -> str:
    """Commits of all commands that measured a run, abbreviated."""
    commits = dict.fromkeys(str(run["commit"]) for run in record["runs"] or [record])
    return ", ".join(re.sub(r"^(\w{7})\w+", r"\1", commit) for commit in commits)


def device_of(record: Record) -> str:
    """The processor that did the work."""
    hardware = record.get("hardware") or {}
    return str(hardware.get("gpu") or hardware.get("cpu") or "unknown")


@dataclass(frozen=True)
class Inputs:
    runs: list[Run]
    heads: list[HeadRecord]
    costs: list[CostRecord]

    @property
    def records(self) -> list[Run | HeadRecord | CostRecord]:
        return [*self.runs, *self.heads, *self.costs]


def read_inputs(paths: Iterable[Path]) -> Inputs:
    """Runs and records, told apart by their content. Two of one name differ by a prime."""
    found, seen = Inputs([], [], []), set[str]()
    for path in paths:
        file = path / RESULTS_FILE if path.is_dir() else path
        record = read_record(file)
        name = path.stem if path.is_file() and path.name != RESULTS_FILE else file.resolve().parent.name
        while name in seen:
            name += "'"
        seen.add(name)
        try:
            _add(found, file, name, record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error!r})") from None
    return found


def _add(found: Inputs, file: Path, name: str, record: Record) -> None:
    """Read a whole record, so that a fault is found before anything is printed."""
    if "cells" in record:
        found.runs.append(Run(name, record, _read_cells(file, list(record["cells"]))))
    elif "details" in record:
        head = HeadRecord(name, record)
        if not head.mean or not head.tokens_per_round or not all(map(math.isfinite, head.gaps)):
            raise ValueError(f"{file} holds no results of a head")
        found.heads.append(head)
    elif "costs" in record or {"shape", "runs"} <= set(record):
        costs = CostRecord(name, record)
        if not costs.costs:
            raise ValueError(f"{file} has no costs")
        found.costs.append(costs)
    else:
        raise ValueError(f"{file} is no result of `benchmarks run`, `jetspec eval-head` or `jetspec profile`")


def read_record(file: Path) -> Record:
    """A record; keys of older ones get their new names."""
    try:
        record = with_new_keys(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if file.name != RESULTS_FILE or not file.parent.is_dir():
            raise ValueError(f"there is no {file}") from None
        if (file.parent / ROWS_FILE).exists():
            raise ValueError(f"{file.parent} is not finished; the same `benchmarks run` resumes it") from None
        raise ValueError(f"{file.parent} is no folder of `benchmarks run`: it has no {RESULTS_FILE}") from None
    except ValueError:
        raise ValueError(f"{file} is not JSON") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"{file} is not a record")
    return record


def _read_cells(file: Path, raw: Iterable[Record]) -> tuple[Result, ...]:
    cells = []
    for number, cell in enumerate(raw):
        try:
            cells.append(Result.read(cell))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: cell {number} cannot be read ({error!r})") from None
    if not cells:
        raise ValueError(f"{file} has no cells")
    return tuple(cells)
