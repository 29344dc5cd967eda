"""The one reader of finished measurements: folders of runs, and the records of other commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from benchmarks.estimate import Estimate, how_many
from benchmarks.recipe import PLAIN, TRANSFORMERS, Cell, with_new_keys

Record = Mapping[str, Any]
T = TypeVar("T")
RESULTS_FILE, ROWS_FILE, RUN_FILE = "results.json", "rows.jsonl", "run.json"
FEW_REPEATS = 3
"""Fewer repeats leave even large differences within chance."""
PARTIAL_MARK = "*"
"""Behind scores of fewer tests than a task is known for."""
PARTIAL_NOTE = (
    f"{PARTIAL_MARK} Questions without tests, graded by the calls in their docstrings: higher than published scores, "
    "and only good for comparing methods."
)


def from_record(cls: type[T], raw: Record, **values: Any) -> T:
    """A dataclass whose fields are those of a record, but for the given ones."""
    return cls(**{field.name: raw[field.name] for field in fields(cls) if field.name not in values}, **values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Score:
    """Right answers among those that have a grader."""

    correct: int
    graded: int
    partial: int
    """Answers graded by fewer tests than the task is known for."""
    cut: int
    """Answers that reached the limit of tokens."""
    right: Sequence[str]
    """Questions answered correctly."""
    wrong: Sequence[str]

    @property
    def share(self) -> Estimate:
        """Share of right answers, with its standard error by Laplace's rule."""
        p = (self.correct + 1) / (self.graded + 2)
        error = math.sqrt(p * (1 - p) / (self.graded + 3))
        return Estimate(self.correct / self.graded, error, error)

    @property
    def mark(self) -> str:
        return PARTIAL_MARK if self.partial else ""


@dataclass(frozen=True)
class Lossless:
    """Texts beside those of plain decoding. A gap is the distance of two tokens in the target's logits."""

    check: str
    """Greedy tokens, seeded tokens, or greedy text."""
    compared: int
    identical: int
    ties: int
    """Texts that differ only where rounding decided between two tokens."""
    different: Sequence[Record]

    @property
    def mistakes(self) -> int:
        """Texts that differ where the target was decided."""
        return self.compared - self.identical - self.ties


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
    accepted: Sequence[int]
    """Rounds by accepted length, from 0."""
    prefill_s: Estimate | None
    speedup: Estimate | None
    """Over plain decoding."""
    speedup_transformers: Estimate | None
    score: Score | None
    lossless: Lossless | None
    errors: Sequence[Record]
    """Answers that failed: `id`, `repeat`, `error`."""

    @classmethod
    def read(cls, raw: Record) -> Result:
        rounds = raw["tokens_per_round"]
        return from_record(
            cls,
            raw,
            **{name: Estimate.of(raw[name]["values"]) for name in ("tokens_per_s", "prefill_s")},
            tokens_per_round=Estimate.of_parts(rounds["questions"], rounds.get("ids") or ()),
            **{name: Estimate.read_ratios(raw[name]) for name in ("speedup", "speedup_transformers")},
            score=from_record(Score, raw["score"]) if raw["score"] else None,
            lossless=from_record(Lossless, raw["lossless"]) if raw["lossless"] else None,
        )

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

    @property
    def place(self) -> tuple[int, int]:
        """Context and depth."""
        return self.context, self.depth


@dataclass(frozen=True)
class Run:
    """A record: the cells of a benchmark, the costs of drafting, or the scores of a head."""

    name: str
    record: Record
    cells: Sequence[Result] = ()
    costs: Sequence[DraftCost] = ()

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
        return str(self.record.get("model") or self.record.get("shape") or self.recipe.get("model") or "unknown")

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def gaps(self) -> list[float]:
        """log q - log p of a head's top paths, of all tasks, in nats."""
        return [gap for task in self.record["details"].values() for gap in task["top_path"].get("gaps_nats", ())]

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


def skipped(skip: int | Mapping[str, int], tasks: Iterable[str]) -> str:
    """Number of questions passed over, per task where they differ."""
    if not isinstance(skip, Mapping):
        return f" behind the first {skip}"
    by_count: dict[int, list[str]] = {}
    for task in tasks:
        by_count.setdefault(skip.get(task, 0), []).append(task)
    parts = [f"{count} of {', '.join(some)}" for count, some in by_count.items() if count]
    return f", behind the first {' and '.join(parts)}" if parts else ""


def commits_of(record: Record) -> str:
    """Commits of all commands that measured a run, abbreviated."""
    commits = dict.fromkeys(str(run["commit"]) for run in record["runs"] or [record])
    return ", ".join(re.sub(r"^(\w{7})\w+", r"\1", commit) for commit in commits)


def device_of(record: Record) -> str:
    """The processor that did the work."""
    hardware = record.get("hardware") or {}
    return str(hardware.get("gpu") or hardware.get("cpu") or "unknown")


def read_inputs(paths: Iterable[Path]) -> list[Run]:
    """Runs and records. Two of one name differ by a prime."""
    found: dict[str, Run] = {}
    for path in paths:
        file = path / RESULTS_FILE if path.is_dir() else path
        name = path.stem if path.is_file() and path.name != RESULTS_FILE else file.resolve().parent.name
        while name in found:
            name += "'"
        record = read_record(file)
        if not ({"cells", "details", "costs"} & set(record) or {"shape", "runs"} <= set(record)):
            raise ValueError(f"{file} is no result of `benchmarks run`, `jetspec eval-head` or `jetspec profile`")
        try:
            found[name] = _read_run(name, record)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file} is damaged ({error!r})") from None
    return list(found.values())


def _read_run(name: str, record: Record) -> Run:
    """A whole record, so that a fault is found before anything is printed."""
    if "cells" in record:
        run = Run(name, record, cells=[Result.read(cell) for cell in record["cells"]])
    elif "details" in record:
        run = Run(name, record)
        rows = [record["mean"], *record["tokens_per_round"].values()]
        numbers = [float(row[tree]) for row in rows for tree in record["mean"]]
        if len(rows) > 1 and numbers and all(map(math.isfinite, run.gaps)):
            return run
    else:
        run = Run(name, record, costs=list(_read_costs(record)))
    if not (run.cells or run.costs):
        raise ValueError("it has no cells, scores or costs")
    return run


def _read_costs(record: Record) -> Iterator[DraftCost]:
    """Times of `jetspec profile`, or of a run of an earlier release with `measure: costs`."""
    for raw in record.get("costs", ()):
        times = [Estimate(raw[name]["mean"], raw[name]["sd"]) for name in ("draft_ms", "verify_ms", "c_percent")]
        yield DraftCost(raw["context"], raw["depth"], raw["depth"] + 1, 1, *times)
    for run in () if "costs" in record else record["runs"]:
        depth = record["head"]["block_size"] - 1  # a block holds the token that is known, then drafts
        draft, verify = run["stages_ms"]["draft"], run["stages_ms"]["verify"]
        times = [Estimate(time) for time in (draft, verify, 100 * draft / (depth * verify))]
        yield DraftCost(run["context"], depth, run["budget"], run["batch"], *times)


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


# -- records of the engine's speed and texts


def read_engine(path: Path) -> Record:
    """A record, with its `results` by precision: those of `run` are files of their own, such as NAME_float32.json."""
    record = read_record(path)
    if "cells" not in record:
        return record
    others = map(read_record, sorted(path.parent.glob(f"{path.stem}_float*.json")))
    found = [record, *(other for other in others if other["commit"] == record["commit"])]
    about = {"head": record["recipe"]["head"] or record["model"], "max_tokens": record["recipe"]["max_tokens"]}
    return {**record, **about, "results": {each["dtype"]: each for each in found}}


def engine_rows(record: Record) -> pd.DataFrame:
    """A row per precision and setting of our engine, from the records of `run`, or of the checks before them."""
    rows: list[dict[str, Any]] = []
    for dtype, result in record["results"].items():
        if "cells" in result:
            run = _read_run(dtype, result)
            rows += [{"dtype": dtype, **_engine_row(run, cell)} for cell in run.cells if cell.budget is not None]
        else:
            about = {"dtype": dtype, "set": "", "batch": 1, "depth": None, "batch_trees": False}
            about |= {key: result.get(key) for key in ("tie_limit", "transformers_prompts")}
            rows += [{**about, **row} for row in result.get("runs", [result])]
    for row in rows:
        # Wide ties are those that readings of their own text show.
        known = [each for each in row.pop("differences", ()) if each["gap"] is not None]
        row["widest"] = max((each["gap"] for each in known), default=0.0)
        row["wide"] = sum(each["tie"] and each["gap"] > row["tie_limit"] for each in known)
    return pd.DataFrame(rows, columns=None if rows else ["set", "batch", "budget", "prompts"])


def _engine_row(run: Run, cell: Result) -> dict[str, Any]:
    methods = {method["name"]: method for method in run.recipe["methods"]}
    tree = next(tree for tree in methods[cell.method]["trees"] if tree["budget"] == cell.budget)
    texts = cell.lossless
    means = {name: getattr(cell, name) for name in ("tokens_per_s", "tokens_per_round", "speedup")}
    means["speedup_over_transformers"] = cell.speedup_transformers
    return {
        "set": cell.task,
        "prompts": texts.compared if texts else 0,
        **{name: getattr(cell, name) for name in ("batch", "budget", "tokens")},
        **{name: tree[name] for name in ("depth", "batch_trees")},
        **{name: value and value.mean for name, value in means.items()},
        "different": len(texts.different) if texts else 0,
        "mistakes": texts.mistakes if texts else 0,
        "differences": texts.different if texts else (),
        "tie_limit": run.widest_tie or 0.0,
        "transformers_prompts": methods.get(TRANSFORMERS, {}).get("limit"),
    }


def best_over_plain(rows: pd.DataFrame) -> pd.Series[float]:
    """Speed of the fastest tree over that of plain decoding, by set and batch size."""
    best = rows.groupby(["set", "batch", rows.budget == 1]).tokens_per_s.max().unstack()
    return best[False] / best[True]
