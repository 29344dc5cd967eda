"""What was measured, on stdout: one table for a person, or its numbers for other programs."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from io import StringIO
from typing import Any, Literal

from benchmarks.document import Table, markdown_table
from benchmarks.recipe import Cell
from benchmarks.runs import CostRecord, DraftCost, Inputs, Result, Run
from benchmarks.spread import Spread
from benchmarks.tables import cells_table, cost_table, in_order

SummaryForm = Literal["md", "csv", "json", "jsonl"]


def summary(inputs: Inputs, form: SummaryForm) -> str:
    """All cells of all runs; where there are no runs, what drafting costs. Nothing where there is neither."""
    if form == "md":
        return "\n".join(markdown_table(table) + "\n" for table in _tables(inputs))
    rows = [cell_row(run, cell) for run in inputs.runs for cell in in_order(run.cells)]
    rows = rows or [cost_row(record, cost) for record in inputs.costs for cost in record.costs]
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _tables(inputs: Inputs) -> list[Table]:
    if inputs.runs:
        return [cells_table(inputs.runs)]
    return [cost_table(record, beside_paper=False) for record in inputs.costs]


def cell_row(run: Run, cell: Result) -> dict[str, Any]:
    """The numbers of a cell, flat."""
    score, lossless = cell.score, cell.lossless
    return {
        "run": run.name,
        "model": run.model,
        "device": run.device,
        **{field.name: getattr(cell, field.name) for field in fields(Cell)},
        "questions": cell.questions,
        "together": cell.together,
        "tokens": cell.tokens,
        **_flat("tokens_per_s", cell.tokens_per_s),
        "tokens_per_round": cell.tokens_per_round.mean if cell.tokens_per_round else None,
        "tokens_per_round_se": cell.tokens_per_round.sd if cell.tokens_per_round else None,
        **_flat("speedup", cell.speedup),
        "speedup_se_questions": cell.speedup.questions.sd if cell.speedup and cell.speedup.questions else None,
        "differs": cell.speedup.differs_from_1() if cell.speedup else None,
        **_flat("speedup_transformers", cell.speedup_transformers),
        **_flat("prefill_s", cell.prefill_s),
        "correct": score.correct if score else None,
        "graded": score.graded if score else None,
        "partial": score.partial if score else None,
        "cut": score.cut if score else None,
        "compared": lossless.compared if lossless else None,
        "identical": lossless.identical if lossless else None,
        "ties": lossless.ties if lossless else None,
        "mistakes": lossless.mistakes if lossless else None,
        "failed": len(cell.errors),
    }


def cost_row(record: CostRecord, cost: DraftCost) -> dict[str, Any]:
    return {
        "run": record.name,
        "model": record.model,
        "device": record.device,
        **{name: getattr(cost, name) for name in ("context", "depth", "budget", "batch")},
        **_flat("draft_ms", cost.draft_ms),
        **_flat("verify_ms", cost.verify_ms),
        **_flat("c_percent", cost.c_percent),
    }


MEDIANS = ("tokens_per_s", "speedup", "speedup_transformers", "prefill_s")


def _flat(name: str, value: Spread | None) -> dict[str, float | None]:
    """A median where there were repeats to take it of."""
    found = {name: value.mean if value else None, f"{name}_sd": value.sd if value else None}
    return found | ({f"{name}_median": value.median if value else None} if name in MEDIANS else {})
