"""The report of runs and records: warnings, speed, scores, losslessness, and the paper's results beside ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import tables
from benchmarks.document import folded, make_table, to_html
from benchmarks.estimate import how_many
from benchmarks.options import Output, examples
from benchmarks.paper import find_pairs, missing_rows, paper_costs, run_differences, setting_differences
from benchmarks.plots import PLOTS, Painter, batch_plots, gap_histogram, has_matplotlib, setting_plots
from benchmarks.results import Record, Run, read_inputs
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
    """Markdown of a report, with the plots of a painter; `paper` sets the paper's results beside ours."""
    runs = [run for run in inputs if run.cells]
    several = len(runs) > 1

    def section(title: str, run: Run, text: str) -> Iterator[str]:
        if text:
            yield f"## {title}: {run.name}" if several else f"## {title}"
            yield text

    def parts() -> Iterator[str]:
        yield f"# {TITLE}"
        if painter is None:
            yield note(EXTRA)
        for run in runs:
            yield from (note(f"{run.name}: {text}") for text in _warnings(run))
        for number, run in enumerate(runs):
            speed = _speed(run, painter, f"{number}_" if several else "")
            yield from section("Speed", run, "\n\n".join(speed))
        for run in runs:
            yield from section("Settings of the methods", run, tables.methods_table(run))
            yield from section("How heads were trained", run, tables.heads_table(run))
            yield from section("Scores", run, tables.score_table(run))
            yield from section("Losslessness", run, tables.lossless_table(run))
            lists = ("Texts that differ", tables.differences_table(run)), ("Failures", tables.errors_table(run))
            yield from (folded(f"{name}: {run.name}", table) for name, table in lists if table)
        if several and len(runs) == 2:
            yield from _against(*runs)
        for run in runs if paper else ():
            yield from section("Beside the paper", run, "\n\n".join(_paper(run)))
        yield from _heads([run for run in inputs if "details" in run.record], painter)
        costs: dict[tuple[str, str], list[Run]] = {}
        for run in inputs:
            if run.costs:
                costs.setdefault((run.model, run.device), []).append(run)
        for (model, _), alike in costs.items():
            yield from _costs(alike, alike[0].name if len(alike) == 1 else model, paper)
        yield from _origin(inputs)

    return "\n\n".join(parts()) + "\n"


def note(text: str) -> str:
    """A warning that stands before the numbers."""
    return f"> **Note:** {text}"


def _warnings(run: Run) -> Iterator[str]:
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


def _speed(run: Run, painter: Painter | None, prefix: str) -> Iterator[str]:
    yield run.setting
    for where, cells in tables.groups_of(run.cells):
        yield f"### {where[0].upper()}{where[1:]}"
        yield tables.glance_table(cells, run.widest_tie)
        if painter is not None:
            yield from setting_plots(painter, f"{prefix}t{cells[0].temperature:g}_b{cells[0].batch}", where, cells)
        if len(cells) > len({cell.method for cell in cells}):  # else the table at a glance holds every cell
            for title, table in tables.task_tables(cells).items():
                yield f"{title}:"
                yield table
    for temperature, own in tables.by_key("temperature", run.cells).items():
        if painter is not None:
            name = f"{prefix}speedup_batch_t{temperature:g}"
            yield from batch_plots(painter, name, f"temperature {temperature:g}", own)


def _against(a: Run, b: Run) -> Iterator[str]:
    yield "## A against B"
    yield f"A is {a.name}, B is {b.name}."
    seen = {key: (a.recipe.get(key), b.recipe.get(key)) for key in sorted({*a.recipe, *b.recipe})}
    seen |= {"device": (a.device, b.device)}  # the actual one, where the recipe leaves it open
    seen |= {key: (a.record.get(key), b.record.get(key)) for key in ("commit", "versions")}
    if different := [f"{key} {_brief(x)} and {_brief(y)}" for key, (x, y) in seen.items() if x != y]:
        yield note(f"The two were not run alike: {'; '.join(different)}.")
    if table := tables.against_table(a, b):
        yield table
    if missing := len({cell.key for cell in a.cells} ^ {cell.key for cell in b.cells}):
        yield f"{missing} cells are in one of the runs only and are not compared."


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _paper(run: Run) -> Iterator[str]:
    pairs = sorted(find_pairs(run), key=lambda pair: pair.row.table.number)
    if not pairs:
        return
    yield (
        "The paper's speedups are over the autoregressive loop of its own stack, ours over our plain decoding. Compare "
        "tokens per round first: they depend on neither. The text at hand says neither how many questions it asks nor "
        f"how long an answer may be; here: {run.setting}"
    )
    for table, group in groupby(pairs, key=lambda pair: pair.row.table):
        yield f"### Table {table.number}: {table.title}"
        yield from _other_settings(run_differences(run, table))
        of_table = list(group)
        yield tables.paper_table(of_table)
        yield from filter(None, (missing_rows(table, of_table), table.note))
    if alone := len(run.cells) - len({pair.cell.key for pair in pairs}):
        yield f"{alone} of {len(run.cells)} cells have no counterpart: the paper has not measured their setting."


def _other_settings(different: Sequence[str]) -> Iterator[str]:
    if different:
        yield note(f"Not the paper's settings: {'; '.join(different)}.")


def _costs(runs: Sequence[Run], name: str, beside_paper: bool) -> Iterator[str]:
    """Costs of one model on one device: a record may hold one depth."""
    yield f"## Cost of drafting: {name}"
    paper, known = paper_costs()
    costs = sorted((cost for run in runs for cost in run.costs), key=lambda cost: (cost.depth, cost.context))
    beside_paper = beside_paper and any((cost.context, cost.depth) in known for cost in costs)
    if beside_paper:
        yield from _other_settings(setting_differences(runs[0].model, runs[0].device, paper))
    yield tables.cost_table(costs, beside_paper)
    yield "c: time of a draft pass over the tokens that it drafts and the time of a verify pass."
    if beside_paper:
        if missing := len(known.keys() - {(cost.context, cost.depth) for cost in costs}):
            yield f"{missing} of the paper's {len(known)} values are of contexts and depths not measured here."
        yield f"The paper's are those of its table {paper.number}. {paper.note}"


def _heads(heads: Sequence[Run], painter: Painter | None) -> Iterator[str]:
    if heads:
        yield "## Heads"
    for head in heads:
        yield f"{head.name}: {head.record.get('head') or 'the default head'} for {head.record.get('model')}."
        yield tables.head_table(head)
    if painter is not None:
        yield from gap_histogram(painter, heads)


def _origin(inputs: Sequence[Run]) -> Iterator[str]:
    """Commands, machines and versions behind the numbers; then all cells and recipes."""
    yield "## Where the numbers come from"
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
    yield make_table(told, text_columns=1 + len(inputs), wraps=True)
    for run in inputs:
        if run.cells:
            yield folded(f"All cells: {run.name}", tables.cells_table([run], details=True))
            yield folded(f"Recipe: {run.name}", f"```json\n{json.dumps(run.recipe, indent=1)}\n```")


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
