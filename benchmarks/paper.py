"""The paper's results, and their counterparts among ours."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.recipe import PAPER_BUDGET, PAPER_DEPTH, PAPER_DRAFT_TEMPERATURE, PAPER_WIDTH
from benchmarks.results import Result, Run, from_record
from jetspec.config import Expand, Score
from jetspec.settings import read_settings

MAIN_MODEL = "Qwen3-8B"
"""Target of all tables but one; that one is compared with runs of its own target alone."""


@dataclass(frozen=True)
class Counterpart:
    """The paper's name of a method of ours, and the known settings of its trees."""

    name: str
    kind: str
    """A method of another kind is something else under any name."""
    expand: Expand | None = "paper"
    """None: not stated."""
    score: Score = "accum_logp"
    remark: str = ""
    """Difference beside that of settings."""


_METHODS = read_settings(Path(__file__).with_name("paper_methods.yaml"))
OURS = {name: Counterpart(**raw) for name, raw in _METHODS["ours"].items()}
"""Our methods by name."""
OURS_ALONE: list[str] = _METHODS["ours_alone"]
"""Methods that the paper has not measured."""


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    model: str
    gpu: str | None
    engine: str | None
    """Engine, where it was not the authors' own."""
    note: str


@dataclass(frozen=True)
class PaperRow:
    """One measurement of the paper. None: not stated."""

    table: PaperTable
    method: str
    task: str
    temperature: float
    budget: int | None
    batch: int
    speedup: float
    tokens_per_round: float | None
    tokens_per_s: float | None

    @property
    def label(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget}"


@dataclass(frozen=True)
class Pair:
    """A cell of ours and the paper's row for the same method, task and setting."""

    cell: Result
    row: PaperRow
    remark: str
    """Differences between the two methods, and settings not stated."""


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    data = _read()
    rows = []
    for raw in data["tables"]:
        table = from_record(PaperTable, raw)
        rows += [PaperRow(table, **dict(zip(data["columns"], values, strict=True))) for values in raw["rows"]]
    return tuple(rows)


@cache
def paper_costs() -> tuple[PaperTable, dict[tuple[int, int], float]]:
    """By context and draft length: the time of drafting a token, in percent of a verify pass."""
    raw = _read()["costs"]
    return from_record(PaperTable, raw), {(context, length): percent for context, length, percent in raw["rows"]}


def _read() -> Any:
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))


def find_pairs(run: Run) -> list[Pair]:
    """Cells whose method, task and setting the paper has, too; none of a run that does not say what its methods are."""
    return [pair for cell in run.cells for pair in _pairs_of(cell, run)]


def missing_rows(table: PaperTable, pairs: Iterable[Pair]) -> str:
    """Sentence about rows of a table without a counterpart; empty where there are none."""
    known = {pair.row for pair in pairs}
    rows = [row for row in paper_rows() if row.table == table]
    missing = Counter(row.label for row in rows if row not in known)
    if not missing:
        return ""
    names = ", ".join(f"{label} ({count})" for label, count in missing.items())
    return f"{missing.total()} of the {len(rows)} rows of the paper's table have no counterpart here: {names}."


def _pairs_of(cell: Result, run: Run) -> Iterator[Pair]:
    method = run.method(cell.method)
    ours = _counterpart(cell.method, method["kind"]) if method else None
    if method is None or ours is None:
        return
    tree = next((tree for tree in method["trees"] if tree["budget"] == cell.budget), None)
    differences = tree_differences(ours, tree, cell.temperature) if tree and not cell.is_plain else []
    for row in paper_rows():
        if row.method != ours.name or (row.task, row.batch) != (cell.task, cell.batch):
            continue
        if row.temperature != cell.temperature or row.budget not in (None, cell.budget):
            continue
        if row.table.model != MAIN_MODEL and not same_model(row.table.model, run.model):
            continue
        unknown = "the paper's budget is not stated" if row.budget is None and not cell.is_plain else ""
        yield Pair(cell, row, "; ".join(filter(None, (ours.remark, *differences, unknown))))


def _counterpart(name: str, kind: str) -> Counterpart | None:
    """Counterpart by name, where name and kind fit; else by kind. None: the paper has nothing like it."""
    if name in OURS_ALONE:
        return None
    named = OURS.get(name)
    return named if named and named.kind == kind else OURS.get(kind)


SHAPES = {"paper": "all children of the best nodes", "optimal": "the best nodes"}


def tree_differences(ours: Counterpart, tree: Mapping[str, Any], temperature: float) -> list[str]:
    """Known differences of a tree from the paper's. The draft temperature has an effect on greedy requests alone."""
    found, width = [], tree["width"]
    published = published_width(tree["budget"]) if ours.expand == "paper" else None
    if ours.expand == "paper" and published is None:
        found.append(f"width {width}, the paper's is not stated")
    elif published is not None and width != published:
        found.append(f"width {width}, in the paper {published}")
    is_known = ours.expand == "optimal" or published == PAPER_WIDTH
    if ours.expand is not None and is_known and tree["expand"] != ours.expand:
        found.append(f"a tree of {SHAPES[tree['expand']]}, in the paper of {SHAPES[ours.expand]}")
    if tree["score"] != ours.score:
        found.append(f"score {tree['score']}, in the paper {ours.score}")
    if tree["depth"] is not None and tree["depth"] != PAPER_DEPTH:
        found.append(f"depth {tree['depth']}, in the paper that of a block or not stated")
    draft_temperature = tree.get("draft_temperature", PAPER_DRAFT_TEMPERATURE)
    if temperature == 0 and draft_temperature != PAPER_DRAFT_TEMPERATURE:
        found.append(f"draft temperature {draft_temperature:g}, in the paper {PAPER_DRAFT_TEMPERATURE:g}")
    return found


def published_width(budget: int) -> int | None:
    """Width of JetSpec's trees: drafts of 16 nodes are linear. None: not stated."""
    if budget > PAPER_DEPTH + 1:
        return PAPER_WIDTH if budget >= PAPER_BUDGET else None
    return 1


def same_model(a: str, b: str) -> bool:
    """Equality of the names' last parts in any spelling: `Qwen/Qwen3-8B` is `qwen3-8b`."""
    return _bare(a) == _bare(b)


def setting_differences(model: str, device: str, table: PaperTable) -> list[str]:
    """Differences of model and device from one of the paper's tables."""
    found = []
    if not same_model(table.model, model):
        found.append(f"the target is {model}, in the paper {table.model}")
    if table.gpu is None:
        found.append(f"it ran on {device}; the paper does not say on what")
    elif _bare(table.gpu) not in _bare(device):
        found.append(f"it ran on {device}, in the paper on {table.gpu}")
    return found


def run_differences(run: Run, table: PaperTable) -> list[str]:
    """Known differences of a whole run from one of the paper's tables."""
    found = setting_differences(run.model, run.device, table)
    if table.engine is not None:
        found.append(f"our engine decoded, in the paper {table.engine}")
    if (dtype := run.record.get("dtype")) != "bfloat16":
        found.append(f"the weights are {dtype}, in the paper bfloat16")
    if (thinking := run.recipe.get("thinking")) is not False:
        ours = "lets the target think first" if thinking else "is left to itself"
        found.append(f"the chat template {ours}, in the paper it lets the target not think (`thinking: false`)")
    return found


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
