"""Finished measurements as they are read back: the folder of a benchmark, or the record of another command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.recipe import PLAIN, Cell
from benchmarks.spread import Spread, how_many

RESULTS_FILE, ROWS_FILE, RUN_FILE = "results.json", "rows.jsonl", "run.json"
FEW_REPEATS = 3
"""With fewer, even large differences are hardly more than chance explains."""
PARTIAL_MARK = "*"
"""Behind scores of fewer tests than a task is known for."""
PARTIAL_NOTE = (
    f"{PARTIAL_MARK} Questions without tests, graded by the calls in their docstrings: higher than published scores, "
    "and only good for comparing methods."
)


@dataclass(frozen=True)
class Score:
    """Answers that were right, of those that have a grader."""

    correct: int
    graded: int
    partial: int
    """How many of them were graded by fewer tests than the task is known for."""
    cut: int
    """How many of them reached the limit of tokens before they ended."""
    right: frozenset[str]
    """Questions answered correctly."""
    wrong: frozenset[str]

    @property
    def share(self) -> Spread:
        """With its standard error by Laplace's rule: none right of ten questions does not make it certain that none of
        a thousand would be."""
        p = (self.correct + 1) / (self.graded + 2)
        error = math.sqrt(p * (1 - p) / (self.graded + 3))
        return Spread(self.correct / self.graded, error, error)

    @property
    def mark(self) -> str:
        return PARTIAL_MARK if self.partial else ""

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> Score | None:
        if raw is None:
            return None
        questions = frozenset(raw["right"]), frozenset(raw["wrong"])
        return cls(raw["correct"], raw["graded"], raw["partial"], raw["cut"], *questions)


@dataclass(frozen=True)
class Lossless:
    """Texts beside those of plain decoding. A gap is how far apart the target holds the two tokens."""

    check: str
    """What was compared: greedy tokens, or drawn ones of the same seed, or only text."""
    compared: int
    identical: int
    ties: int
    """Those that differ only where rounding decided between two tokens."""
    different: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> Lossless | None:
        if raw is None:
            return None
        return cls(raw["check"], raw["compared"], raw["identical"], raw["ties"], tuple(raw["different"]))

    @property
    def mistakes(self) -> int:
        """Those that differ where the target was not undecided."""
        return self.compared - self.identical - self.ties

    @property
    def widest_gap(self) -> float | None:
        return max((d["gap"] for d in self.different if d["gap"] is not None), default=None)


@dataclass(frozen=True)
class Result(Cell):
    """What one method did on one task with one setting."""

    questions: int
    together: int
    """Most questions that were decoded together: less than the batch where there were not enough of them."""
    tokens: int
    tokens_per_s: Spread | None
    """None: every answer failed."""
    tokens_per_round: Spread | None
    """Over all rounds, with its standard error over questions: repeats of greedy decoding do not vary. None: nobody
    could count rounds."""
    accepted: tuple[int, ...]
    """Rounds by accepted length, from 0."""
    prefill_s: Spread | None
    speedup: Spread | None
    """Over plain decoding."""
    speedup_transformers: Spread | None
    score: Score | None
    lossless: Lossless | None
    errors: tuple[Mapping[str, Any], ...]
    """Answers that failed: `id`, `repeat`, `error`."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Result:
        rounds = raw["tokens_per_round"]
        read: dict[str, Any] = {
            **{name: Spread.of(raw[name]["values"]) for name in ("tokens_per_s", "prefill_s")},
            "tokens_per_round": Spread.of_parts(rounds["questions"], rounds.get("ids") or ()),
            **{name: Spread.read_ratios(raw[name]) for name in ("speedup", "speedup_transformers")},
            "accepted": tuple(raw["accepted"]),
            "score": Score.read(raw["score"]),
            "lossless": Lossless.read(raw["lossless"]),
            "errors": tuple(raw["errors"]),
        }
        return cls(**read, **{f.name: raw[f.name] for f in fields(cls) if f.name not in read})

    @property
    def key(self) -> Cell:
        """What makes two results of two runs the same measurement."""
        return Cell(self.method, self.task, self.temperature, self.budget, self.batch)

    @property
    def failed(self) -> set[tuple[str, int]]:
        """Questions without an answer, and the repeats in which they were asked."""
        return {(error["id"], error["repeat"]) for error in self.errors}

    @property
    def is_plain(self) -> bool:
        return self.method == PLAIN

    @property
    def tree(self) -> int | None:
        """Most nodes of its trees. None: it has none, as plain decoding."""
        return None if self.is_plain else self.budget

    @property
    def label(self) -> str:
        return self.method if self.tree is None else f"{self.method} {self.tree}"

    @property
    def batch_text(self) -> str:
        return str(self.batch) if self.together == self.batch else f"{self.together} of {self.batch}"

    @property
    def round_cost(self) -> float | None:
        """Time of a round in plain steps: what its tokens would have cost, over how much faster they came."""
        return self.tokens_per_round.mean / self.speedup.mean if self.tokens_per_round and self.speedup else None


def partial_note(cells: Iterable[Result]) -> str:
    """The footnote of a table in which a score is marked."""
    return f" {PARTIAL_NOTE}" if any(cell.score and cell.score.partial for cell in cells) else ""


def skipped(skip: int | Mapping[str, int], tasks: Iterable[str]) -> str:
    """How many questions of every task were passed over, or of which; empty where none were."""
    if not isinstance(skip, Mapping):
        return f" behind the first {skip}"
    by_count: dict[int, list[str]] = {}
    for task in tasks:
        by_count.setdefault(skip.get(task, 0), []).append(task)
    parts = [f"{count} of {', '.join(some)}" for count, some in by_count.items() if count]
    return f", behind the first {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Run:
    """A benchmark: where it comes from, and its cells."""

    name: str
    record: Mapping[str, Any]
    cells: tuple[Result, ...]

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.record.get("recipe") or {}

    @property
    def notes(self) -> list[str]:
        """What a reader of its tables should know."""
        own = [note for field in ("notes", "ungraded") for note in self.record.get(field) or ()]
        return [*own, *(self.recipe.get("notes") or ())]

    @property
    def widest_tie(self) -> float | None:
        """Tokens closer than this may have changed places by rounding. None: no text gave reason to measure it."""
        return (self.record.get("noise") or {}).get("widest_tie")

    @property
    def model(self) -> str:
        return str(self.record.get("model") or self.recipe.get("model") or "unknown")

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def setting(self) -> str:
        """What was measured on what, in a line."""
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
        """What to say of numbers that were measured too seldom to know how much they vary."""
        repeats = min((len(cell.tokens_per_s.values) for cell in self.cells if cell.tokens_per_s), default=FEW_REPEATS)
        if repeats >= FEW_REPEATS:
            return None
        few = "once, so nothing says" if repeats == 1 else "twice, which says little of"
        return f"measured {few} how much its numbers vary. Use --repeats {FEW_REPEATS} or more."

    def method(self, name: str) -> Mapping[str, Any] | None:
        """What a method is: its kind, its trees, and settings of its own. None: the record does not say."""
        methods = self.recipe.get("methods") or ()
        return next((method for method in methods if method["name"] == name and "trees" in method), None)

    def cell(self, key: Cell) -> Result | None:
        return next((cell for cell in self.cells if cell.key == key), None)


@dataclass(frozen=True)
class HeadRecord:
    """What `jetspec eval-head` found out about a head."""

    name: str
    record: Mapping[str, Any]

    @property
    def mean(self) -> Mapping[str, float]:
        """Tokens per round over all tasks, by tree."""
        return {tree: float(value) for tree, value in self.record["mean"].items()}

    @property
    def tokens_per_round(self) -> Mapping[str, Mapping[str, float]]:
        """By task and tree."""
        return {
            task: {tree: float(row[tree]) for tree in self.mean}
            for task, row in self.record["tokens_per_round"].items()
        }

    @property
    def gaps(self) -> list[float]:
        """log q - log p of top paths, of all tasks, in nats."""
        return [gap for task in self.record["details"].values() for gap in task["top_path"].get("gaps_nats", ())]


@dataclass(frozen=True)
class DraftCost:
    """What drafting costs beside verifying, at one setting."""

    context: int
    depth: int
    """Tokens drafted in a pass."""
    budget: int
    batch: int
    draft_ms: Spread
    verify_ms: Spread
    c_percent: Spread
    """Of a drafted token, in verify passes."""


@dataclass(frozen=True)
class CostRecord:
    """What `jetspec bench` with `measure: costs` timed, or `jetspec profile`."""

    name: str
    record: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.record["model"] if "costs" in self.record else self.record["shape"])

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def costs(self) -> list[DraftCost]:
        return [_chain_cost(raw) for raw in self.record["costs"]] if "costs" in self.record else self._profiled()

    def _profiled(self) -> list[DraftCost]:
        """Of a profile: a block holds the token that is known, and drafts."""
        depth = self.record["head"]["block_size"] - 1
        found = []
        for run in self.record["runs"]:
            draft, verify = run["stages_ms"]["draft"], run["stages_ms"]["verify"]
            times = Spread(draft), Spread(verify), Spread(100 * draft / (depth * verify))
            found.append(DraftCost(run["context"], depth, run["budget"], run["batch"], *times))
        return found


def _chain_cost(raw: Mapping[str, Any]) -> DraftCost:
    times = {name: Spread(raw[name]["mean"], raw[name]["sd"]) for name in ("draft_ms", "verify_ms", "c_percent")}
    return DraftCost(raw["context"], raw["depth"], raw["depth"] + 1, 1, **times)


def commits_of(record: Mapping[str, Any]) -> str:
    """Of all that measured a run, in short, one after the other."""
    commits = dict.fromkeys(str(run["commit"]) for run in record["runs"] or [record])
    return ", ".join(re.sub(r"^(\w{7})\w+", r"\1", commit) for commit in commits)


def device_of(record: Mapping[str, Any]) -> str:
    """The processor that did the work."""
    hardware = record.get("hardware") or {}
    return str(hardware.get("gpu") or hardware.get("cpu") or "unknown")


@dataclass(frozen=True)
class Inputs:
    """What a report is made of."""

    runs: list[Run]
    heads: list[HeadRecord]
    costs: list[CostRecord]


def read_inputs(paths: Iterable[Path]) -> Inputs:
    """Told apart by what they hold. Names are those of folders or files; a prime tells apart two of one name."""
    found, seen = Inputs([], [], []), set[str]()
    for path in paths:
        file = path / RESULTS_FILE if path.is_dir() else path
        record = read_record(file)
        name = path.stem if path.is_file() and path.name != RESULTS_FILE else file.resolve().parent.name
        while name in seen:
            name += "'"
        seen.add(name)
        try:
            _take(found, file, name, record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error!r})") from None
    return found


def _take(found: Inputs, file: Path, name: str, record: Mapping[str, Any]) -> None:
    """Read all of a record, so that what it lacks is known before anything is printed."""
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
        raise ValueError(f"{file} is no result of `jetspec bench`, `jetspec eval-head` or `jetspec profile`")


def read_record(file: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.name != RESULTS_FILE or not file.parent.is_dir():
            raise ValueError(f"there is no {file}") from None
        if (file.parent / ROWS_FILE).exists():
            raise ValueError(f"{file.parent} is not finished; the same `jetspec bench` goes on with it") from None
        raise ValueError(f"{file.parent} is no run of `jetspec bench`: it has no {RESULTS_FILE}") from None
    except ValueError:
        raise ValueError(f"{file} is not JSON") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"{file} is not a record")
    return record


def _read_cells(file: Path, raw: Iterable[Mapping[str, Any]]) -> tuple[Result, ...]:
    cells = []
    for number, cell in enumerate(raw):
        try:
            cells.append(Result.read(cell))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: cell {number} cannot be read ({error!r})") from None
    if not cells:
        raise ValueError(f"{file} has no cells")
    return tuple(cells)
