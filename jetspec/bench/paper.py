"""The paper's results, and which of ours stand beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jetspec.bench.recipe import PLAIN, TRANSFORMERS
from jetspec.bench.runs import Result, Run

MAIN_MODEL = "Qwen3-8B"
"""The target of all tables but one, which is compared with runs of its own target alone."""

LOST = "the paper's value is lost, so ours stands beside it by rank"
LEARNING_RATES = ("0.001", "0.002", "0.005", "0.01", "0.02")
ENTROPY_WEIGHTS = ("0.01", "0.03", "0.1", "0.3", "1", "3")

OURS: dict[str, tuple[tuple[str, ...], str]] = {
    PLAIN: (("plain",), ""),
    "eagle3": (("EAGLE-3",), ""),
    "dflash": (("DFlash",), ""),
    "ddtree": (("DDTree",), ""),
    "jetspec-paper": (("JetSpec",), ""),
    "jetspec": (("JetSpec",), "our tree"),
    "jetspec-edge": (("JetSpec",), "our tree and edge head"),
    **{f"lr-{rate}": ((f"learning rate {i} of 5",), LOST) for i, rate in enumerate(LEARNING_RATES, 1)},
    "sft": (("SFT",), ""),
    "forward-kl": (("forward KL",), ""),
    "reverse-kl": (("reverse KL",), ""),
    "jetspec-corpus": (("JetSpec-Corpus",), ""),
    "causal": (("causal",), ""),
    "bidirectional": (("diffusion",), ""),
    **{f"causal-gamma-{g}": ((f"causal, gamma {g}",), "") for g in (3, 7, 15)},
    **{f"bidirectional-gamma-{g}": ((f"diffusion, gamma {g}",), "") for g in (3, 7, 15)},
    "accum-logp": (("accum_logp",), ""),
    "entropy": (("entropy_guided",), ""),
    **{f"hybrid-{weight}": ((f"hybrid, weight {i} of 6",), LOST) for i, weight in enumerate(ENTROPY_WEIGHTS, 1)},
}
"""Our method -> the paper's names of it, and what a reader must know who compares the two."""

OURS_ALONE = ("ngram", TRANSFORMERS, "transformers-assisted", "transformers-lookup", "server")
"""Methods that the paper has not measured."""


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    model: str
    gpu: str | None
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


@dataclass(frozen=True)
class Pair:
    """A cell of ours and the paper's row for the same method, task and setting."""

    cell: Result
    row: PaperRow
    remark: str
    """What differs between the two methods, or is not known."""


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    data = _read()
    rows = []
    for raw in data["tables"]:
        table = _table(raw)
        rows += [PaperRow(table, **dict(zip(data["columns"], values, strict=True))) for values in raw["rows"]]
    return tuple(rows)


@cache
def paper_costs() -> tuple[PaperTable, dict[tuple[int, int], float]]:
    """By context and draft length: the time of drafting a token, in percent of a verify pass."""
    raw = _read()["costs"]
    return _table(raw), {(context, length): percent for context, length, percent in raw["rows"]}


def _read() -> Any:
    return json.loads(files("jetspec.bench").joinpath("paper_tables.json").read_text(encoding="utf-8"))


def _table(raw: Any) -> PaperTable:
    return PaperTable(raw["table"], raw["title"], raw["model"], raw["gpu"], raw["note"])


def find_pairs(run: Run) -> list[Pair]:
    return [pair for cell in run.cells for pair in _pairs_of(cell, run.model)]


def _pairs_of(cell: Result, model: str) -> Iterator[Pair]:
    names, extra = OURS.get(cell.method, ((), ""))
    for row in paper_rows():
        if row.method not in names or (row.task, row.batch) != (cell.task, cell.batch):
            continue
        if row.temperature != cell.temperature or row.budget not in (None, cell.budget):
            continue
        if row.table.model != MAIN_MODEL and not same_model(row.table.model, model):
            continue
        unknown = "the paper's budget is not stated" if row.budget is None and not cell.is_plain else ""
        yield Pair(cell, row, "; ".join(filter(None, (extra, unknown))))


def same_model(a: str, b: str) -> bool:
    """By the name's last part, whatever its spelling: `Qwen/Qwen3-8B` is `qwen3-8b`."""
    return _bare(a) == _bare(b)


def setting_differences(model: str, device: str, table: PaperTable) -> list[str]:
    """How measurements of a model on a device differ from one of the paper's tables as a whole."""
    found = []
    if not same_model(table.model, model):
        found.append(f"the target is {model}, in the paper {table.model}")
    if table.gpu is None:
        found.append(f"it ran on {device}; the paper does not say on what")
    elif _bare(table.gpu) not in _bare(device):
        found.append(f"it ran on {device}, in the paper on {table.gpu}")
    return found


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
