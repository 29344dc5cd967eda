"""Finished measurements as they are read back: the folder of a benchmark, or the record of another command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

RESULTS = "results.json"
BASELINE = "plain"
NO_DIFFERENCE = "no difference"
SPREADS = 2
"""Values differ when they are more than this many standard deviations apart."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over repeats. None: a single repeat has no spread."""

    mean: float
    sd: float | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any] | float | None) -> Spread | None:
        """From a record: a number, or mean and deviation. None where everything failed, so that there is no mean."""
        if raw is None or isinstance(raw, int | float):
            return None if raw is None else cls(float(raw))
        alone = len(raw.get("values", (0, 0))) < 2
        return None if raw["mean"] is None else cls(raw["mean"], None if alone else raw.get("sd"))

    @classmethod
    def average(cls, parts: Iterable[Spread]) -> Spread:
        """Of independent measurements, each counting the same."""
        parts = list(parts)
        known = [part.sd for part in parts if part.sd is not None]
        sd = math.sqrt(sum(x * x for x in known)) / len(parts) if len(known) == len(parts) else None
        return cls(sum(part.mean for part in parts) / len(parts), sd)

    def over(self, other: Spread) -> Spread:
        """The quotient; relative deviations add as squares."""
        ratio = self.mean / other.mean
        if self.sd is None or other.sd is None:
            return Spread(ratio)
        return Spread(ratio, ratio * math.hypot(self.sd / self.mean, other.sd / other.mean))

    def differs(self, other: Spread) -> bool | None:
        """Whether the two lie further apart than their spreads explain. None: there is no spread to judge by."""
        if self.sd is None or other.sd is None:
            return None
        return abs(self.mean - other.mean) > SPREADS * math.hypot(self.sd, other.sd)

    def text(self, digits: int = 2) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


@dataclass(frozen=True)
class Speedup:
    """Over another method, with whether it is more than the spread."""

    value: Spread
    differs: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None, has_spread: bool) -> Speedup | None:
        if raw is None:
            return None
        return cls(Spread(float(raw["mean"]), raw.get("sd") if has_spread else None), bool(raw["differs"]))

    def text(self) -> str:
        return self.value.text() + ("" if self.differs or self.value.sd is None else f" ({NO_DIFFERENCE})")


@dataclass(frozen=True)
class Score:
    """Answers that were right, of those that have a grader."""

    correct: int
    graded: int

    @property
    def share(self) -> Spread:
        """With its standard error, as of independent answers."""
        p = self.correct / self.graded
        return Spread(p, math.sqrt(p * (1 - p) / (self.graded - 1)) if self.graded > 1 else None)

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> Score | None:
        return cls(raw["correct"], raw["graded"]) if raw and raw["graded"] else None


@dataclass(frozen=True)
class Lossless:
    """Texts beside those of plain decoding. A gap is how far apart the target holds the two tokens."""

    check: str
    """What was compared: greedy tokens, or drawn ones of the same seed, or only text."""
    compared: int
    identical: int
    different: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> Lossless | None:
        if raw is None:
            return None
        return cls(raw.get("check", "greedy tokens"), raw["compared"], raw["identical"], tuple(raw["different"]))

    @property
    def widest_gap(self) -> float | None:
        return max((d["gap"] for d in self.different if d["gap"] is not None), default=None)


@dataclass(frozen=True)
class Cell:
    """What one method did on one task with one setting."""

    method: str
    task: str
    temperature: float
    budget: int | None
    batch: int
    questions: int
    tokens: int
    tokens_per_s: Spread | None
    """None: every answer failed."""
    tokens_per_round: float | None
    accepted: tuple[int, ...]
    """Rounds by accepted length, from 0."""
    prefill_s: Spread | None
    speedup: Speedup | None
    speedup_transformers: Speedup | None
    score: Score | None
    lossless: Lossless | None
    errors: tuple[Any, ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Cell:
        speed = Spread.read(raw["tokens_per_s"])
        has_spread = speed is not None and speed.sd is not None
        per_round = Spread.read(raw.get("tokens_per_round"))
        read: dict[str, Any] = {
            "tokens_per_s": speed,
            "tokens_per_round": per_round and per_round.mean,
            "accepted": tuple(raw.get("accepted") or ()),
            "prefill_s": Spread.read(raw.get("prefill_s")),
            "speedup": Speedup.read(raw.get("speedup"), has_spread),
            "speedup_transformers": Speedup.read(raw.get("speedup_transformers"), has_spread),
            "score": Score.read(raw.get("score")),
            "lossless": Lossless.read(raw.get("lossless")),
            "errors": tuple(raw.get("errors") or ()),
        }
        return cls(**read, **{f.name: raw[f.name] for f in fields(cls) if f.name not in read})

    @property
    def key(self) -> tuple[str, str, float, int | None, int]:
        """What makes two cells of two runs the same measurement."""
        return self.method, self.task, self.temperature, self.budget, self.batch

    @property
    def label(self) -> str:
        return self.method if self.budget is None or self.method == BASELINE else f"{self.method} {self.budget}"

    @property
    def round_cost(self) -> float | None:
        """Time of a round in plain steps: what its tokens would have cost, over how much faster they came."""
        return self.tokens_per_round / self.speedup.value.mean if self.tokens_per_round and self.speedup else None


@dataclass(frozen=True)
class Run:
    """A benchmark: where it comes from, and its cells."""

    name: str
    record: Mapping[str, Any]
    cells: tuple[Cell, ...]

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.record.get("recipe") or {}

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
        parts = [f"{min(counts)}" + (f" to {max(counts)}" if len(counts) > 1 else "") + " questions per task"]
        if "max_tokens" in self.recipe:
            parts.append(f"at most {self.recipe['max_tokens']} tokens per answer")
        if "repeats" in self.recipe:
            parts.append(f"repeats: {self.recipe['repeats']}")
        return f"{' '.join(words)}; {', '.join(parts)}."

    def cell(self, key: tuple[Any, ...]) -> Cell | None:
        return next((cell for cell in self.cells if cell.key == key), None)


@dataclass(frozen=True)
class HeadRecord:
    """What `jetspec eval-head` found out about a head."""

    name: str
    record: Mapping[str, Any]

    @property
    def gaps(self) -> list[float]:
        """log q - log p of top paths, of all tasks, in nats."""
        return [gap for task in self.record["details"].values() for gap in task["top_path"].get("gaps_nats", ())]


@dataclass(frozen=True)
class DraftCost:
    """What drafting costs beside verifying, at one setting."""

    context: int
    budget: int
    batch: int
    length: int
    """Tokens drafted in a pass, the anchor's slot included."""
    draft_ms: float
    verify_ms: float

    @property
    def percent(self) -> float:
        """Of a drafted token, in verify passes."""
        return 100 * self.draft_ms / (self.length * self.verify_ms)


@dataclass(frozen=True)
class ProfileRecord:
    """What `jetspec profile` timed."""

    name: str
    record: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.record["shape"])

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def costs(self) -> list[DraftCost]:
        length = self.record["head"]["block_size"]
        return [
            DraftCost(r["context"], r["budget"], r["batch"], length, r["stages_ms"]["draft"], r["stages_ms"]["verify"])
            for r in self.record["runs"]
        ]


def device_of(record: Mapping[str, Any]) -> str:
    """The processor that did the work."""
    hardware = record.get("hardware") or {}
    return str(hardware.get("gpu") or hardware.get("cpu") or "unknown")


@dataclass(frozen=True)
class Inputs:
    """What a report is made of."""

    runs: list[Run]
    heads: list[HeadRecord]
    profiles: list[ProfileRecord]


def read_inputs(paths: Iterable[Path]) -> Inputs:
    """Told apart by what they hold. Names are those of folders or files; a prime tells apart two of one name."""
    found, seen = Inputs([], [], []), set[str]()
    for path in paths:
        file = path / RESULTS if path.is_dir() else path
        record = _read_json(file)
        name = path.stem if path.is_file() and path.name != RESULTS else file.resolve().parent.name
        while name in seen:
            name += "'"
        seen.add(name)
        if "cells" in record:
            found.runs.append(Run(name, record, _read_cells(file, record["cells"])))
        elif "details" in record:
            found.heads.append(HeadRecord(name, record))
        elif "shape" in record and "runs" in record:
            found.profiles.append(ProfileRecord(name, record))
        else:
            raise ValueError(f"{file} is no result of `jetspec bench`, `jetspec eval-head` or `jetspec profile`")
    return found


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        stopped = "; a run that was stopped goes on with the same `jetspec bench`" if file.parent.is_dir() else ""
        raise ValueError(f"there is no {file}{stopped}") from None
    except ValueError:
        raise ValueError(f"{file} is not JSON") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"{file} is not a record")
    return record


def _read_cells(file: Path, raw: Iterable[Mapping[str, Any]]) -> tuple[Cell, ...]:
    cells = []
    for number, cell in enumerate(raw):
        try:
            cells.append(Cell.read(cell))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: cell {number} cannot be read ({error!r})") from None
    if not cells:
        raise ValueError(f"{file} has no cells")
    return tuple(cells)
