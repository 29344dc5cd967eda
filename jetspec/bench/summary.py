"""The cells of runs as lines for other programs, or as one table for a person."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from typing import Any, Literal

from jetspec.bench.document import Table, markdown_table
from jetspec.bench.runs import BASELINE, Cell, Run
from jetspec.bench.tables import NONE, in_order, text_of

SummaryForm = Literal["md", "csv", "json", "jsonl"]


def summary(runs: Sequence[Run], form: SummaryForm) -> str:
    """All cells: a Markdown table with mean ± standard deviation, or their numbers."""
    if form == "md":
        return markdown_table(_table(runs)) + "\n"
    rows = [to_row(run, cell) for run in runs for cell in in_order(run.cells)]
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_row(run: Run, cell: Cell) -> dict[str, Any]:
    """The numbers of a cell, flat."""
    speedup, over, score, lossless = cell.speedup, cell.speedup_transformers, cell.score, cell.lossless
    return {
        "run": run.name,
        "model": run.model,
        "device": run.device,
        **{k: getattr(cell, k) for k in ("task", "method", "temperature", "budget", "batch", "questions", "tokens")},
        "tokens_per_s": cell.tokens_per_s.mean if cell.tokens_per_s else None,
        "tokens_per_s_sd": cell.tokens_per_s.sd if cell.tokens_per_s else None,
        "speedup": speedup.value.mean if speedup else None,
        "speedup_sd": speedup.value.sd if speedup else None,
        "differs": speedup.differs if speedup else None,
        "speedup_transformers": over.value.mean if over else None,
        "speedup_transformers_sd": over.value.sd if over else None,
        "tokens_per_round": cell.tokens_per_round,
        "correct": score.correct if score else None,
        "graded": score.graded if score else None,
        "compared": lossless.compared if lossless else None,
        "identical": lossless.identical if lossless else None,
        "failed": len(cell.errors),
    }


def _table(runs: Sequence[Run]) -> Table:
    several = len(runs) > 1
    rows = []
    for run in runs:
        for cell in in_order(run.cells):
            score, lossless = cell.score, cell.lossless
            rows.append(
                (
                    *((run.name,) if several else ()),
                    *(cell.task, cell.method, f"{cell.temperature:g}", text_of(cell.budget), str(cell.batch)),
                    text_of(cell.tokens_per_s, 1),
                    cell.speedup.text() if cell.speedup and cell.method != BASELINE else NONE,
                    text_of(cell.tokens_per_round),
                    score.share.text(3) if score else NONE,
                    f"{lossless.identical}/{lossless.compared}" if lossless else NONE,
                )
            )
    columns = ("task", "method", "temp", "budget", "batch", "t/s", "speedup", "tokens/round", "score", "same text")
    return Table(("run", *columns) if several else columns, tuple(rows), first_number=3 if several else 2)
