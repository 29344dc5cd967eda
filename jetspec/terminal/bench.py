"""`jetspec bench`: a benchmark from start to end, and its table in the forms that people know from llama-bench."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from jetspec.bench.costs import CostConfig, cost_results, measure_costs
from jetspec.bench.measure import ROWS_FILE, RUN_FILE, Bench
from jetspec.bench.recipe import PLAIN, TRANSFORMERS, BenchConfig
from jetspec.bench.results import Summary
from jetspec.bench.tasks import BUILTIN, check_tasks
from jetspec.engine.llm import LLM
from jetspec.record import write_record
from jetspec.terminal.screen import err, working
from jetspec.train.config import from_dict, read_recipe

Output = Literal["md", "csv", "json", "jsonl"]
RESULTS_FILE = "results.json"

TIMES = ("draft_ms", "verify_ms", "c_percent")

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


def read_plan(recipe: Path | None, changes: Mapping[str, Any]) -> BenchConfig | CostConfig:
    """A recipe file, or none, with settings that take the place of its own."""
    raw = {**(read_recipe(recipe) if recipe is not None else {}), **changes}
    plans = {"methods": BenchConfig, "costs": CostConfig}
    if (measure := raw.pop("measure", "methods")) not in plans:
        raise ValueError(f"measure is {measure!r}; choose one of {', '.join(plans)}")
    plan: BenchConfig | CostConfig = from_dict(plans[measure], raw, "")
    return plan


def run_plan(plan: BenchConfig | CostConfig, folder: Path, output: Output, *, fresh: bool) -> bool:
    """False: our text is not the target's, with no rounding to blame."""
    if isinstance(plan, BenchConfig):
        return run_bench(plan, folder, output, fresh=fresh)
    run_costs(plan, folder, output)
    return True


def run_bench(config: BenchConfig, folder: Path, output: Output, *, fresh: bool) -> bool:
    """Measure, write the record, print the table; whether our text is the target's."""
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
        _say(line)
    ours = {method.name for method in bench.methods if method.is_ours}
    different = [cell for cell in results["cells"] if cell["method"] in ours and num_different(cell)]
    return not (different and results["dtype"] == "float32")


def run_costs(config: CostConfig, folder: Path, output: Output) -> None:
    """Measure what drafting costs, write the record, print the table: contexts down, depths across."""
    total = len(config.contexts) * len(config.depths)
    costs = list(tqdm(measure_costs(config), total=total, desc="timing chains", unit="chain"))
    write_record(folder / RESULTS_FILE, cost_results(config, costs))
    if output == "md":
        cell = {(cost["context"], cost["depth"]): with_spread(cost["c_percent"], 3) for cost in costs}
        rows = [[str(n), *(cell[n, depth] for depth in config.depths)] for n in config.contexts]
        columns = ["context", *(f"c in % at {depth}" for depth in config.depths)]
        sys.stdout.writelines(line + "\n" for line in markdown(columns, rows, left=0))
    else:
        write_data(costs, [flatten_cost(cost) for cost in costs], output)
    _say(f"written to {folder / RESULTS_FILE}")


def flatten_cost(cost: Mapping[str, Any]) -> dict[str, Any]:
    flat = {"context": cost["context"], "depth": cost["depth"]}
    return flat | {f"{name}_{part}": cost[name][part] for name in TIMES for part in ("mean", "sd")}


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
    if output == "md":
        sys.stdout.writelines(line + "\n" for line in markdown(COLUMNS, [table_row(cell) for cell in cells], left=2))
    else:
        write_data(cells, [flatten(cell) for cell in cells], output)


def write_data(entries: Sequence[Mapping[str, Any]], flat: Sequence[Mapping[str, Any]], output: Output) -> None:
    """For programs: entries as they are, or one flat row each."""
    if output == "json":
        sys.stdout.write(json.dumps(entries, indent=1) + "\n")
    elif output == "jsonl":
        sys.stdout.writelines(json.dumps(entry) + "\n" for entry in entries)
    else:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


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


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns as wide as they must be; but for the first `left` ones, all to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return [line(columns), line(rule), *map(line, rows)]


def _say(line: str) -> None:
    err().print(line, style="dim", markup=False)
