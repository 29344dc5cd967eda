"""What a report says about runs, in order: whether to believe them, how fast, how right, and beside what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from benchmarks.check_tables import (
    differences_table,
    errors_table,
    heads_table,
    lossless_table,
    methods_table,
    score_table,
    unlike_heads,
)
from benchmarks.document import Block, Folded, Heading, Plot, Table, Text, Warned
from benchmarks.paper import find_pairs, missing_rows, paper_costs, run_differences, setting_differences
from benchmarks.plots import (
    Painter,
    acceptance,
    against_batch,
    against_budget,
    equation_1,
    equation_2,
    gap_histogram,
    speedup_bars,
)
from benchmarks.runs import CostRecord, HeadRecord, Inputs, Result, Run
from benchmarks.spread import how_many
from benchmarks.tables import (
    against_table,
    cells_table,
    cost_table,
    glance_table,
    groups_of,
    head_table,
    paper_table,
    remarks_of,
    rounds_of,
    rounds_table,
    speed_table,
    speedup_of,
    speedup_table,
)

TITLE = "JetSpec: benchmark report"
EXTRA = "matplotlib is not installed, so there are no plots: pip install 'jetspec[bench]'"


@dataclass(frozen=True)
class ReportPlan:
    """What a report is about."""

    inputs: Inputs
    paper: bool = True
    """Whether the paper's results stand beside ours."""
    plots: bool = True

    @property
    def runs(self) -> list[Run]:
        return self.inputs.runs


def build_report(plan: ReportPlan) -> list[Block]:
    return [block for part in _parts(plan) for block in part]


def _parts(plan: ReportPlan) -> Iterator[Iterator[Block]]:
    painter = Painter() if plan.plots else None
    if painter is None:
        yield iter([Warned(EXTRA)])
    for run in plan.runs:
        yield _warnings(run)
    for number, run in enumerate(plan.runs):
        yield _speed(run, _titled("Speed", run, plan), painter, f"{number}_" if len(plan.runs) > 1 else "")
    for run in plan.runs:
        yield _section(_titled("Settings of the methods", run, plan), methods_table(run))
        yield _section(_titled("How heads were trained", run, plan), heads_table(run))
        yield _section(_titled("Scores", run, plan), score_table(run))
        yield _section(_titled("Losslessness", run, plan), lossless_table(run))
        yield _lists(run)
    if len(plan.runs) == 2:
        yield _against(*plan.runs)
    if plan.paper:
        for run in plan.runs:
            yield _paper(run, _titled("Beside the paper", run, plan))
    if plan.inputs.heads:
        yield _heads(plan.inputs.heads, painter)
    for record in plan.inputs.costs:
        yield _costs(record, plan.paper)
    yield _everything(plan)


def _titled(title: str, run: Run, plan: ReportPlan) -> str:
    return f"{title}: {run.name}" if len(plan.runs) > 1 else title


def _warnings(run: Run) -> Iterator[Block]:
    failed = sum(len(cell.errors) for cell in run.cells)
    if failed:
        yield Warned(f"{run.name}: {how_many(failed, 'answer')} failed; listed below, they count in no number.")
    if run.few_repeats:
        yield Warned(f"{run.name}: {run.few_repeats}")
    if unlike := unlike_heads(run):
        yield Warned(f"{run.name}: {unlike}")
    yield from (Warned(f"{run.name}: {text}") for text in _lossless_warnings(run))
    yield from (Warned(f"{run.name}: {note}") for note in run.notes)
    if not any(cell.speedup for cell in run.cells):
        yield Warned(f"{run.name}: plain decoding was not measured, so there are no speedups.")


def _lossless_warnings(run: Run) -> Iterator[str]:
    """What is no tie comes first."""
    mistaken = [(cell.label, cell.lossless.mistakes) for cell in run.cells if cell.lossless and cell.lossless.mistakes]
    if mistaken:
        names = ", ".join(dict.fromkeys(label for label, _ in mistaken))
        count = sum(mistakes for _, mistakes in mistaken)
        yield f"{count} texts differ from those of plain decoding, and not at a tie that rounding decides: {names}."
    if ties := sum(cell.lossless.ties for cell in run.cells if cell.lossless):
        yield f"{ties} texts leave those of plain decoding at a tie: two tokens that rounding decides between."
    unchecked = dict.fromkeys(cell.label for cell in run.cells if cell.lossless and not cell.lossless.compared)
    if unchecked:
        yield f"no text could be compared with that of plain decoding: {', '.join(unchecked)}."


def _speed(run: Run, title: str, painter: Painter | None, prefix: str) -> Iterator[Block]:
    yield Heading(title)
    yield Text(run.setting)
    for where, cells in groups_of(run.cells):
        yield Heading(where[0].upper() + where[1:], 3)
        yield glance_table(cells, run.widest_tie)
        if painter is not None:
            mark = f"{prefix}t{cells[0].temperature:g}_b{cells[0].batch}"
            yield from _plots(painter, mark, where, cells)
        yield from _by_task(cells)
    if painter is not None:
        for temperature in dict.fromkeys(cell.temperature for cell in run.cells):
            name, own = f"speedup_batch_t{temperature:g}", [c for c in run.cells if c.temperature == temperature]
            yield from against_batch(painter, prefix + name, f"temperature {temperature:g}", own)


def _by_task(cells: Sequence[Result]) -> Iterator[Block]:
    """Nothing where every method has one cell: the table at a glance has shown it."""
    if len(cells) == len({cell.method for cell in cells}):
        return
    tables = (
        ("Speedup over plain decoding", speedup_table(cells)),
        ("Tokens per second", speed_table(cells)),
        ("Tokens per round", rounds_table(cells)),
    )
    for name, table in tables:
        if table is not None:
            yield Text(f"{name}:")
            yield table


def _plots(painter: Painter, mark: str, where: str, cells: Sequence[Result]) -> Iterator[Plot]:
    drawn = (
        speedup_bars(painter, f"speedup_{mark}", where, cells),
        against_budget(
            painter, f"rounds_{mark}", f"Tokens per round against budget, {where}", cells, rounds_of, "tokens per round"
        ),
        against_budget(
            painter,
            f"speedup_budget_{mark}",
            f"Speedup against budget, {where}",
            cells,
            speedup_of,
            "speedup over plain",
        ),
        acceptance(painter, f"acceptance_{mark}", where, cells),
        equation_1(painter, f"equation1_{mark}", where, cells),
        equation_2(painter, f"equation2_{mark}", where, cells),
    )
    return (plot for plot in drawn if plot is not None)


def _section(title: str, table: Table | None) -> Iterator[Block]:
    if table is not None:
        yield Heading(title)
        yield table


def _lists(run: Run) -> Iterator[Block]:
    for name, table in (("Texts that differ", differences_table(run)), ("Answers that failed", errors_table(run))):
        if table is not None:
            yield Folded(f"{name}: {run.name}", table)


def _against(a: Run, b: Run) -> Iterator[Block]:
    yield Heading("A against B")
    yield Text(f"A is {a.name}, B is {b.name}.")
    different = _different_settings(a, b)
    if different:
        yield Warned(f"The two were not run alike: {'; '.join(different)}.")
    table = against_table(a, b)
    if table.rows:
        yield table
    missing = len({cell.key for cell in a.cells} ^ {cell.key for cell in b.cells})
    if missing:
        yield Text(f"{missing} cells are in one of the runs only and are not compared.")


def _different_settings(a: Run, b: Run) -> list[str]:
    seen = {key: (a.recipe.get(key), b.recipe.get(key)) for key in sorted({*a.recipe, *b.recipe})}
    seen |= {"device": (a.device, b.device)}  # what it was, whatever the recipe leaves open
    seen |= {key: (a.record.get(key), b.record.get(key)) for key in ("commit", "versions")}
    return [f"{key} {_brief(x)} and {_brief(y)}" for key, (x, y) in seen.items() if x != y]


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
        yield paper_table(of_table)
        for number, remark in enumerate(remarks_of(of_table), 1):
            yield Text(f"({number}) {remark}.")
        if missing := missing_rows(table, of_table):
            yield Text(missing)
        if table.note:
            yield Text(table.note)
    alone = len(run.cells) - len({pair.cell.key for pair in pairs})
    if alone:
        yield Text(f"{alone} of {len(run.cells)} cells have no counterpart: the paper has not measured their setting.")


def _other_settings(different: Sequence[str]) -> Iterator[Block]:
    if different:
        yield Warned(f"Not the paper's settings: {'; '.join(different)}.")


def _costs(record: CostRecord, beside_paper: bool) -> Iterator[Block]:
    yield Heading(f"Cost of drafting: {record.name}")
    paper, known = paper_costs()
    beside_paper = beside_paper and any((cost.context, cost.depth) in known for cost in record.costs)
    if beside_paper:
        yield from _other_settings(setting_differences(record.model, record.device, paper))
    yield cost_table(record, beside_paper)
    if beside_paper:
        if missing := len(known.keys() - {(cost.context, cost.depth) for cost in record.costs}):
            yield Text(f"{missing} of the paper's {len(known)} values are of contexts and depths not measured here.")
        yield Text(f"The paper's are those of its table {paper.number}. {paper.note}")


def _heads(heads: Sequence[HeadRecord], painter: Painter | None) -> Iterator[Block]:
    yield Heading("Heads")
    for head in heads:
        yield Text(f"{head.name}: {head.record.get('head') or 'the default head'} for {head.record.get('model')}.")
        yield head_table(head)
    plot = gap_histogram(painter, heads) if painter is not None else None
    if plot is not None:
        yield plot


def _everything(plan: ReportPlan) -> Iterator[Block]:
    yield Heading("Where the numbers come from")
    inputs: list[Run | HeadRecord | CostRecord] = [*plan.runs, *plan.inputs.heads, *plan.inputs.costs]
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("command", lambda record: _ran(record, "command", "; then ")),
        ("date", lambda record: str(record.get("date"))),
        ("commit", lambda record: _ran(record, "commit", ", ")),
        ("hardware", lambda record: _pairs(record.get("hardware") or {})),
        ("versions", lambda record: _pairs(record.get("versions") or {})),
        ("graded later", _graded),
    ]
    columns = ("", *(each.name for each in inputs))
    lines = ((name, *(show(each.record) for each in inputs)) for name, show in rows)
    yield Table(columns, tuple(line for line in lines if any(line[1:])), first_number=len(columns), wraps=True)
    for run in plan.runs:
        yield Folded(f"All cells: {run.name}", cells_table([run], details=True))
        yield Folded(f"Recipe: {run.name}", json.dumps(run.recipe, indent=1))


def _ran(record: Mapping[str, Any], key: str, between: str) -> str:
    """Of a benchmark that went on after a stop what all that measured have, else what the record has."""
    ran = [str(run[key]) for run in record.get("runs") or () if isinstance(run, dict) and key in run]
    return between.join(dict.fromkeys(ran)) or str(record.get(key))


def _graded(record: Mapping[str, Any]) -> str:
    """Whoever graded the answers after the record was first written."""
    graded = record.get("graded") or {}
    return f"{graded['command']} ({graded['date']}, {_pairs(graded['versions'])})" if graded else ""


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
