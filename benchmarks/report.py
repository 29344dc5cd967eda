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
from benchmarks.document import Block, Details, Heading, Note, Plot, Table, Text, make_table, to_html, to_markdown
from benchmarks.estimate import how_many
from benchmarks.options import Output, examples
from benchmarks.paper import find_pairs, missing_rows, paper_costs, run_differences, setting_differences
from benchmarks.plots import Painter, against_batch, gap_histogram, has_matplotlib, setting_plots
from benchmarks.results import CostRecord, HeadRecord, Inputs, Record, Result, Run, read_inputs
from benchmarks.tables import Form
from jetspec.commands.screen import err, working
from jetspec.files import install_hint, write_whole

TITLE = "JetSpec: benchmark report"
EXTRA = f"matplotlib is not installed, so there are no plots: {install_hint('bench')}"
PLOTS = "plots"
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


def print_summary(paths: Sequence[Path], form: Form) -> Inputs:
    """Read runs and records, and print their cells to stdout."""
    inputs = read_inputs(paths)
    sys.stdout.write(tables.summary(inputs, form))
    sys.stdout.flush()
    return inputs


def report_folder(path: Path) -> Path:
    """Default folder of the report of a run or record."""
    return (path if path.is_dir() else path.parent) / "report"


def write_report(inputs: Inputs, folder: Path, paper: bool = True) -> None:
    plots = has_matplotlib()
    if not plots:
        err().print(EXTRA, markup=False)
    with working("Drawing"):
        blocks = build_report(inputs, paper, plots)
    pictures = [block for block in blocks if isinstance(block, Plot)]
    (folder / PLOTS if pictures else folder).mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_whole(folder / PLOTS / f"{picture.name}.svg", picture.svg + "\n")
    write_whole(folder / "report.md", to_markdown(TITLE, blocks, PLOTS))
    write_whole(folder / "report.html", to_html(TITLE, blocks))
    err().print(f"{folder / 'report.html'}, report.md and {len(pictures)} plots", style="dim", markup=False)


def build_report(inputs: Inputs, paper: bool = True, plots: bool = True) -> list[Block]:
    """Blocks of a report; `paper` sets the paper's results beside ours."""
    painter = Painter() if plots else None
    several = len(inputs.runs) > 1

    def titled(title: str, run: Run) -> str:
        return f"{title}: {run.name}" if several else title

    def parts() -> Iterator[Block]:
        if painter is None:
            yield Note(EXTRA)
        for run in inputs.runs:
            yield from (Note(f"{run.name}: {text}") for text in _warnings(run))
        for number, run in enumerate(inputs.runs):
            yield from _speed(run, titled("Speed", run), painter, f"{number}_" if several else "")
        for run in inputs.runs:
            yield from _section(titled("Settings of the methods", run), tables.methods_table(run))
            yield from _section(titled("How heads were trained", run), tables.heads_table(run))
            yield from _section(titled("Scores", run), tables.score_table(run))
            yield from _section(titled("Losslessness", run), tables.lossless_table(run))
            lists = ("Texts that differ", tables.differences_table(run)), ("Failures", tables.errors_table(run))
            yield from (Details(f"{name}: {run.name}", table) for name, table in lists if table is not None)
        if len(inputs.runs) == 2:
            yield from _against(*inputs.runs)
        for run in inputs.runs if paper else ():
            yield from _paper(run, titled("Beside the paper", run))
        if inputs.heads:
            yield from _heads(inputs.heads, painter)
        for record in inputs.costs:
            yield from _costs(record, paper)
        yield from _origin(inputs)

    return list(parts())


def _warnings(run: Run) -> Iterator[str]:
    if failed := sum(len(cell.errors) for cell in run.cells):
        yield f"{how_many(failed, 'answer')} failed; listed below, they count in no number."
    if run.few_repeats:
        yield run.few_repeats
    if unlike := tables.unlike_heads(run):
        yield unlike
    yield from _lossless_warnings(run)
    yield from run.notes
    if not any(cell.speedup for cell in run.cells):
        yield "plain decoding was not measured, so there are no speedups."


def _lossless_warnings(run: Run) -> Iterator[str]:
    checked = [(cell.label, cell.lossless) for cell in run.cells if cell.lossless]
    if mistaken := {label: None for label, check in checked if check.mistakes}:
        count = sum(check.mistakes for _, check in checked)
        yield f"{count} texts differ from those of plain decoding, and not at a tie: {', '.join(mistaken)}."
    if ties := sum(check.ties for _, check in checked):
        yield f"{ties} texts leave those of plain decoding at a tie: two tokens that rounding decides between."
    if unchecked := {label: None for label, check in checked if not check.compared}:
        yield f"no text could be compared with that of plain decoding: {', '.join(unchecked)}."


def _speed(run: Run, title: str, painter: Painter | None, prefix: str) -> Iterator[Block]:
    yield Heading(title)
    yield Text(run.setting)
    for where, cells in tables.groups_of(run.cells):
        yield Heading(where[0].upper() + where[1:], 3)
        yield tables.glance_table(cells, run.widest_tie)
        if painter is not None:
            yield from setting_plots(painter, f"{prefix}t{cells[0].temperature:g}_b{cells[0].batch}", where, cells)
        yield from _by_task(cells)
    for temperature in dict.fromkeys(cell.temperature for cell in run.cells) if painter else ():
        name, own = f"speedup_batch_t{temperature:g}", [c for c in run.cells if c.temperature == temperature]
        yield from against_batch(painter, prefix + name, f"temperature {temperature:g}", own)


def _by_task(cells: Sequence[Result]) -> Iterator[Block]:
    """Nothing where every method has one cell: the table at a glance holds it."""
    if len(cells) == len({cell.method for cell in cells}):
        return
    made = (
        ("Speedup over plain decoding", tables.speedup_table(cells)),
        ("Tokens per second", tables.speed_table(cells)),
        ("Tokens per round", tables.rounds_table(cells)),
    )
    for name, table in made:
        if table is not None:
            yield Text(f"{name}:")
            yield table


def _section(title: str, table: Table | None) -> Iterator[Block]:
    if table is not None:
        yield Heading(title)
        yield table


def _against(a: Run, b: Run) -> Iterator[Block]:
    yield Heading("A against B")
    yield Text(f"A is {a.name}, B is {b.name}.")
    seen = {key: (a.recipe.get(key), b.recipe.get(key)) for key in sorted({*a.recipe, *b.recipe})}
    seen |= {"device": (a.device, b.device)}  # the actual one, where the recipe leaves it open
    seen |= {key: (a.record.get(key), b.record.get(key)) for key in ("commit", "versions")}
    if different := [f"{key} {_brief(x)} and {_brief(y)}" for key, (x, y) in seen.items() if x != y]:
        yield Note(f"The two were not run alike: {'; '.join(different)}.")
    table = tables.against_table(a, b)
    if table.rows:
        yield table
    if missing := len({cell.key for cell in a.cells} ^ {cell.key for cell in b.cells}):
        yield Text(f"{missing} cells are in one of the runs only and are not compared.")


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _paper(run: Run, title: str) -> Iterator[Block]:
    pairs = sorted(find_pairs(run), key=lambda pair: pair.row.table.number)
    if not pairs:
        return
    yield Heading(title)
    yield Text(
        "The paper's speedups are over the autoregressive loop of its own stack, ours over our plain decoding. Compare "
        "tokens per round first: they depend on neither. The text at hand says neither how many questions it asks nor "
        f"how long an answer may be; here: {run.setting}"
    )
    for table, group in groupby(pairs, key=lambda pair: pair.row.table):
        yield Heading(f"Table {table.number}: {table.title}", 3)
        yield from _other_settings(run_differences(run, table))
        of_table = list(group)
        yield tables.paper_table(of_table)
        for number, remark in enumerate(tables.remarks_of(of_table), 1):
            yield Text(f"({number}) {remark}.")
        yield from (Text(text) for text in (missing_rows(table, of_table), table.note) if text)
    if alone := len(run.cells) - len({pair.cell.key for pair in pairs}):
        yield Text(f"{alone} of {len(run.cells)} cells have no counterpart: the paper has not measured their setting.")


def _other_settings(different: Sequence[str]) -> Iterator[Block]:
    if different:
        yield Note(f"Not the paper's settings: {'; '.join(different)}.")


def _costs(record: CostRecord, beside_paper: bool) -> Iterator[Block]:
    yield Heading(f"Cost of drafting: {record.name}")
    paper, known = paper_costs()
    beside_paper = beside_paper and any((cost.context, cost.depth) in known for cost in record.costs)
    if beside_paper:
        yield from _other_settings(setting_differences(record.model, record.device, paper))
    yield tables.cost_table(record, beside_paper)
    if beside_paper:
        if missing := len(known.keys() - {(cost.context, cost.depth) for cost in record.costs}):
            yield Text(f"{missing} of the paper's {len(known)} values are of contexts and depths not measured here.")
        yield Text(f"The paper's are those of its table {paper.number}. {paper.note}")


def _heads(heads: Sequence[HeadRecord], painter: Painter | None) -> Iterator[Block]:
    yield Heading("Heads")
    for head in heads:
        yield Text(f"{head.name}: {head.record.get('head') or 'the default head'} for {head.record.get('model')}.")
        yield tables.head_table(head)
    plot = gap_histogram(painter, heads) if painter is not None else None
    if plot is not None:
        yield plot


def _origin(inputs: Inputs) -> Iterator[Block]:
    """Commands, machines and versions behind the numbers; then all cells and recipes."""
    yield Heading("Where the numbers come from")
    shown: dict[str, Callable[[Record], str]] = {
        "command": lambda record: _ran(record, "command", "; then "),
        "date": lambda record: str(record.get("date")),
        "commit": lambda record: _ran(record, "commit", ", "),
        "hardware": lambda record: _pairs(record.get("hardware") or {}),
        "versions": lambda record: _pairs(record.get("versions") or {}),
        "graded later": _graded,
    }
    rows = [{"": name, **{each.name: show(each.record) for each in inputs.records}} for name, show in shown.items()]
    told = [row for row in rows if any(list(row.values())[1:])]
    yield make_table(told, text_columns=1 + len(inputs.records), wraps=True, keep_empty=True)
    for run in inputs.runs:
        yield Details(f"All cells: {run.name}", tables.cells_table([run], details=True))
        yield Details(f"Recipe: {run.name}", json.dumps(run.recipe, indent=1))


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
