"""`jetspec bench`: a benchmark from start to end, and its table in the forms that people know from llama-bench."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jetspec.bench.measure import ROWS_FILE, RUN_FILE, Bench
from jetspec.bench.recipe import PLAIN, TRANSFORMERS, BenchConfig
from jetspec.bench.results import Summary
from jetspec.bench.tasks import BUILTIN, check_tasks
from jetspec.engine.llm import LLM
from jetspec.record import write_record
from jetspec.terminal.screen import err, working

Output = Literal["md", "csv", "json", "jsonl"]
RESULTS_FILE = "results.json"

QUICK: dict[str, Any] = {"tasks": [BUILTIN], "limit": 6, "max_tokens": 48, "budgets": [16], "repeats": 3}
"""A few minutes on a CPU."""

COLUMNS = (
    "method",
    "task",
    "temp",
    "budget",
    "batch",
    "tokens/s",
    "tokens/round",
    "speedup",
    "over HF",
    "score",
    "same",
)


def run_bench(config: BenchConfig, folder: Path, output: Output, *, fresh: bool) -> bool:
    """Measure, write the record, print the table. False: our text is not the target's, with no rounding to blame."""
    check_tasks(config.tasks, Path(config.data_dir) if config.data_dir else None)
    if fresh:
        for name in (ROWS_FILE, RUN_FILE, RESULTS_FILE):
            (folder / name).unlink(missing_ok=True)
    with working(f"Loading {config.model}"):
        llm = LLM(config.model, config.head, device=config.device, dtype=config.dtype)
    bench = Bench(config, llm, folder)
    summary = Summary(bench, bench.run(progress=True))
    results = summary.results()
    write_record(folder / RESULTS_FILE, results)
    write_table(results["cells"], output)
    for line in (*summary.notes, *remarks(results), f"written to {folder / RESULTS_FILE}"):
        err().print(line, style="dim", markup=False)
    ours = {method.name for method in bench.methods if method.is_ours}
    different = [cell for cell in results["cells"] if cell["method"] in ours and num_different(cell)]
    return not (different and results["dtype"] == "float32")


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What a table has no room for."""
    failed = sum(len(cell["errors"]) for cell in results["cells"])
    lines = [f"{failed} answers failed; the record says why"] if failed else []
    for cell in results["cells"]:
        for found in cell["lossless"]["different"][:3] if cell["lossless"] else ():
            gap = (
                "one text ends earlier" if found["gap"] is None else f"{found['gap']:.2g} apart in the target's logits"
            )
            where = f"{found['id']}, turn {found['turn']}, from token {found['position']} on"
            lines.append(f"{cell['method']} differs from {PLAIN} in {where}: {gap}")
    return lines


def num_different(cell: Mapping[str, Any]) -> int:
    return len(cell["lossless"]["different"]) if cell["lossless"] else 0


def write_table(cells: Sequence[Mapping[str, Any]], output: Output) -> None:
    if output == "json":
        sys.stdout.write(json.dumps(cells, indent=1) + "\n")
    elif output == "jsonl":
        sys.stdout.writelines(json.dumps(cell) + "\n" for cell in cells)
    elif output == "csv":
        flat = [flatten(cell) for cell in cells]
        writer = csv.DictWriter(sys.stdout, fieldnames=list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    else:
        sys.stdout.writelines(line + "\n" for line in markdown([table_row(cell) for cell in cells]))


def flatten(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a cell, one per column."""
    flat = {name: cell[name] for name in ("method", "task", "temperature", "budget", "batch", "questions", "tokens")}
    for name in ("tokens_per_s", "prefill_s", "speedup", "speedup_transformers"):
        flat |= {f"{name}_{part}": (cell[name] or {}).get(part) for part in ("mean", "sd")}
    score, lossless = cell["score"] or {}, cell["lossless"] or {}
    flat |= {
        "tokens_per_round": cell["tokens_per_round"],
        "correct": score.get("correct"),
        "graded": score.get("graded"),
    }
    return flat | {
        "compared": lossless.get("compared"),
        "identical": lossless.get("identical"),
        "errors": len(cell["errors"]),
    }


def table_row(cell: Mapping[str, Any]) -> list[str]:
    score, lossless = cell["score"], cell["lossless"]
    return [
        cell["method"],
        cell["task"],
        f"{cell['temperature']:g}",
        "-" if cell["budget"] is None else str(cell["budget"]),
        str(cell["batch"]),
        with_spread(cell["tokens_per_s"], 1),
        "-" if cell["tokens_per_round"] is None else f"{cell['tokens_per_round']:.2f}",
        ratio(cell["speedup"], is_base=cell["method"] == PLAIN),
        ratio(cell["speedup_transformers"], is_base=cell["method"] == TRANSFORMERS),
        "-" if score is None else f"{score['correct']}/{score['graded']}",
        "-" if lossless is None else f"{lossless['identical']}/{lossless['compared']}",
    ]


def with_spread(value: Mapping[str, Any], digits: int) -> str:
    if value["mean"] is None:
        return "-"
    sd = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{sd}"


def ratio(value: Mapping[str, Any] | None, is_base: bool) -> str:
    """A speedup inside the spread is no difference, and is marked so."""
    if value is None:
        return "-"
    if is_base:
        return "1"
    return with_spread(value, 2) + ("" if value["differs"] else " (≈)")


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right, columns as wide as they must be."""
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    left = 2

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = [("-" * width if i < left else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    return [line(COLUMNS), line(rule), *map(line, rows)]
