"""The report of runs and records: warnings, speed, scores, losslessness, and the paper's results beside ours."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import paper as published
from benchmarks import plots, tables
from benchmarks.document import folded, make_table, template, to_html
from benchmarks.estimate import how_many
from benchmarks.options import Output, examples
from benchmarks.paper import Pair, PaperTable
from benchmarks.plots import PLOTS, Painter, has_matplotlib
from benchmarks.results import DraftCost, Record, Run, read_inputs
from benchmarks.tables import Form
from jetspec.commands.screen import err, working
from jetspec.files import install_hint, write_whole

TITLE = "JetSpec: benchmark report"
EXTRA = f"matplotlib is not installed, so there are no plots: {install_hint('bench')}"
EPILOG = examples(
    "report runs/bench/smollm2",
    "report runs/before runs/after --out comparison",
    "report runs/bench/smollm2 results/head.json --out docs/results/smollm2",
    "report runs/bench/smollm2 --output csv > cells.csv",
)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `run`; records of `jetspec eval-head` and `jetspec profile`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder; by default `report` in the first run.")] = None,
    output: Output = "md",
    paper: Annotated[bool, typer.Option("--paper/--no-paper", help="Show the paper's results beside ours.")] = True,
) -> None:
    """Make tables and plots of measurements.

    Writes report.html, one page without other files, report.md, and the plots. Two runs are also compared with each
    other, cell by cell.
    """
    write_report(print_summary(runs, output), out or report_folder(runs[0]), paper)


def print_summary(paths: Sequence[Path], form: Form) -> list[Run]:
    """Read runs and records, and print their cells to stdout."""
    inputs = read_inputs(paths)
    sys.stdout.write(tables.summary(inputs, form))
    sys.stdout.flush()
    return inputs


def report_folder(path: Path) -> Path:
    """Default folder of the report of a run or record."""
    return (path if path.is_dir() else path.parent) / "report"


def write_report(inputs: Sequence[Run], folder: Path, paper: bool = True) -> None:
    painter = Painter() if has_matplotlib() else None
    if painter is None:
        err().print(EXTRA, markup=False)
    with working("Drawing"):
        text = build_report(inputs, paper, painter)
    pictures = painter.pictures if painter else {}
    (folder / PLOTS if pictures else folder).mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / PLOTS / f"{name}.svg", svg + "\n")
    write_whole(folder / "report.md", text)
    write_whole(folder / "report.html", to_html(TITLE, text, pictures))
    err().print(f"{folder / 'report.html'}, report.md and {len(pictures)} plots", style="dim", markup=False)


def build_report(inputs: Sequence[Run], paper: bool = True, painter: Painter | None = None) -> str:
    """Markdown of a report from `report.md.j2`, with the plots of a painter; `paper` sets the paper's results beside
    ours."""

    def draw(make: Callable[..., list[str]], *args: Any) -> str:
        return "\n\n".join(make(painter, *args)) if painter else ""

    runs = [run for run in inputs if run.cells]
    helpers = (draw, joined, folded, warnings, different, not_in_both, by_table, alone, costs_of, origin)
    names: dict[str, Any] = {helper.__name__: helper for helper in helpers}
    names |= {"tables": tables, "plots": plots, "paper": published, "json": json.dumps}
    told = {"title": TITLE, "missing": "" if painter else EXTRA, "several": len(runs) > 1, "beside_paper": paper}
    heads = [run for run in inputs if "details" in run.record]
    text = template("report.md.j2").render(inputs=inputs, runs=runs, heads=heads, **told, **names)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def warnings(run: Run) -> Iterator[str]:
    if failed := sum(len(cell.errors) for cell in run.cells):
        yield f"{how_many(failed, 'answer')} failed; listed below, they count in no number."
    if run.few_repeats:
        yield run.few_repeats
    if unlike := tables.unlike_heads(run):
        yield unlike
    checked = [(cell.label, cell.lossless) for cell in run.cells if cell.lossless]
    if mistaken := {label: None for label, check in checked if check.mistakes}:
        count = sum(check.mistakes for _, check in checked)
        yield f"{count} texts differ from those of plain decoding, and not at a tie: {', '.join(mistaken)}."
    if ties := sum(check.ties for _, check in checked):
        yield f"{ties} texts leave those of plain decoding at a tie: two tokens that rounding decides between."
    if unchecked := {label: None for label, check in checked if not check.compared}:
        yield f"no text could be compared with that of plain decoding: {', '.join(unchecked)}."
    yield from run.notes
    if not any(cell.speedup for cell in run.cells):
        yield "plain decoding was not measured, so there are no speedups."


def joined(*texts: str | None) -> str:
    """Texts as one paragraph on a line."""
    return " ".join(" ".join(text.split()) for text in texts if text).strip()


def different(a: Run, b: Run) -> list[str]:
    """Settings in which two runs differ."""
    seen = {key: (a.recipe.get(key), b.recipe.get(key)) for key in sorted({*a.recipe, *b.recipe})}
    seen |= {"device": (a.device, b.device)}  # the actual one, where the recipe leaves it open
    seen |= {key: (a.record.get(key), b.record.get(key)) for key in ("commit", "versions")}
    return [f"{key} {_brief(x)} and {_brief(y)}" for key, (x, y) in seen.items() if x != y]


def not_in_both(a: Run, b: Run) -> int:
    return len({cell.key for cell in a.cells} ^ {cell.key for cell in b.cells})


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def by_table(pairs: Sequence[Pair]) -> list[tuple[PaperTable, list[Pair]]]:
    """Pairs of every table of the paper."""
    pairs = sorted(pairs, key=lambda pair: pair.row.table.number)
    return [(table, list(group)) for table, group in groupby(pairs, key=lambda pair: pair.row.table)]


def alone(run: Run, pairs: Sequence[Pair]) -> int:
    """Cells without a counterpart in the paper."""
    return len(run.cells) - len({pair.cell.key for pair in pairs})


def costs_of(inputs: Sequence[Run]) -> Iterator[tuple[str, str, str, list[DraftCost]]]:
    """Name, model, device and costs. A record may hold one depth: those of a model on a device are shown together."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in inputs:
        if run.costs:
            found.setdefault((run.model, run.device), []).append(run)
    for (model, device), runs in found.items():
        costs = sorted((cost for run in runs for cost in run.costs), key=lambda cost: (cost.depth, cost.context))
        yield runs[0].name if len(runs) == 1 else model, model, device, costs


def origin(inputs: Sequence[Run]) -> str:
    """Commands, machines and versions behind the numbers."""
    shown: dict[str, Callable[[Record], str]] = {
        "command": lambda record: _ran(record, "command", "; then "),
        "date": lambda record: str(record.get("date")),
        "commit": lambda record: _ran(record, "commit", ", "),
        "hardware": lambda record: _pairs(record.get("hardware") or {}),
        "versions": lambda record: _pairs(record.get("versions") or {}),
        "graded later": _graded,
    }
    rows = [{"": name, **{each.name: show(each.record) for each in inputs}} for name, show in shown.items()]
    told = [row for row in rows if any(list(row.values())[1:])]
    return make_table(told, text_columns=1 + len(inputs), wraps=True)


def _ran(record: Record, key: str, between: str) -> str:
    """Value of all commands that measured, else the record's own."""
    ran = [str(run[key]) for run in record.get("runs") or () if isinstance(run, dict) and key in run]
    return between.join(dict.fromkeys(ran)) or str(record.get(key))


def _graded(record: Record) -> str:
    """Command that graded the answers after the record was first written."""
    graded = record.get("graded") or {}
    return f"{graded['command']} ({graded['date']}, {_pairs(graded['versions'])})" if graded else ""


def _pairs(values: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
