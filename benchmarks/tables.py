"""The tables of a report, from the cells of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from benchmarks.document import Table
from benchmarks.paper import Pair, paper_costs
from benchmarks.recipe import PLAIN, TRANSFORMERS
from benchmarks.runs import CostRecord, HeadRecord, Lossless, Result, Run, partial_note
from benchmarks.spread import NO_DIFFERENCE, Spread, speedup_text

NONE = "-"
BOLD = "Bold: the best of a column, and all less than two standard deviations of their difference behind it."
OVER_REPEATS = f"Mean ± standard deviation over repeats of the same questions. {BOLD}"
OVER_QUESTIONS = f"Mean ± standard error over questions. {BOLD}"
PAIRED = "Methods that answered the same questions are compared question by question."


def text_of(value: Spread | float | int | str | None, digits: int = 2) -> str:
    if value is None:
        return NONE
    if isinstance(value, Spread):
        return value.text(digits)
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def without_empty(table: Table) -> Table:
    """Without the columns that say nothing in any row."""
    keep = [c for c in range(len(table.columns)) if any(row[c] != NONE for row in table.rows)]
    return replace(
        table,
        columns=tuple(table.columns[c] for c in keep),
        rows=tuple(tuple(row[c] for c in keep) for row in table.rows),
        first_number=sum(c < table.first_number for c in keep),
    )


def in_order(cells: Iterable[Result]) -> list[Result]:
    """Methods as they come, each with its budgets from small to large."""
    cells = list(cells)
    rank = {method: i for i, method in enumerate(dict.fromkeys(cell.method for cell in cells))}
    return sorted(cells, key=lambda c: (c.temperature, c.batch, rank[c.method], c.budget or 0))


def groups_of(cells: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    """Cells that may stand in one table: of one temperature and batch size."""
    ordered = in_order(cells)
    return [
        (f"temperature {temperature:g}, batch {batch}", list(group))
        for (temperature, batch), group in groupby(ordered, key=lambda c: (c.temperature, c.batch))
    ]


def matrix(
    cells: Sequence[Result],
    value: Callable[[Result], Spread | None],
    show: Callable[[Spread], str],
    spread: str = OVER_REPEATS,
    mean: Callable[[Iterable[Spread]], Spread] = Spread.average,
    about: str = "",
) -> Table:
    """A row per method and budget, a column per task, and one for their mean where there are several.

    The caption is what there is to say about the numbers, and about their spread where there is one.
    """
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    at = {(cell.label, cell.task): cell for cell in cells}
    values: list[list[Spread | None]] = []
    rows = []
    for label in dict.fromkeys(cell.label for cell in cells):
        found = [at.get((label, task)) for task in tasks]
        numbers = [value(cell) if cell else None for cell in found]
        if len(tasks) > 1:
            numbers.append(over_tasks(numbers, len(tasks), mean))
        values.append(numbers)
        rows.append((label, *(show(number) if number else NONE for number in numbers)))
    bold = frozenset((r, c + 1) for c in range(len(values[0])) for r in _best([row[c] for row in values]))
    means = ("mean",) if len(tasks) > 1 else ()
    varies = any(number is not None and number.sd is not None for row in values for number in row)
    caption = " ".join(filter(None, (about, spread if varies else "")))
    return Table(("method, budget", *tasks, *means), tuple(rows), caption, bold=bold)


def _best(column: Sequence[Spread | None]) -> list[int]:
    """Rows with the highest value and those near it; none where the spread is not known."""
    known = [(number.mean, row) for row, number in enumerate(column) if number is not None and number.sd is not None]
    if not known:
        return []
    best = column[max(known)[1]]
    assert best is not None
    return [row for _, row in known if (number := column[row]) is not None and best.is_near(number)]


def speedup_table(cells: Sequence[Result]) -> Table | None:
    """None where there is nothing to be faster than."""
    faster = [cell for cell in cells if cell.speedup and not cell.is_plain]
    speedups = [cell.speedup for cell in faster]
    judged = (judged_by(speedups), pairing(speedups))
    spread = " ".join(filter(None, (OVER_REPEATS, "≈: not shown to differ from plain decoding.", *judged)))
    return matrix(faster, speedup_of, speedup_text, spread) if faster else None


def judged_by(speedups: Iterable[Spread | None], what: str = "speedups") -> str:
    """What claims on them go by, for a caption; nothing where there are none."""
    known = [value for value in speedups if value is not None]
    if not known:
        return ""
    over = [value for value in known if value.questions]
    if not over:
        return f"Other questions may move {what} further than repeats of these do."
    some = "" if len(over) == len(known) else ", where there were several"
    return f"{what[0].upper() + what[1:]} are also judged by their standard error over questions{some}."


def pairing(values: Iterable[Spread | None]) -> str:
    """For a caption: whether two values are compared question by question."""
    return PAIRED if any(v and (v.asked or (v.questions and v.questions.asked)) for v in values) else ""


def speedup_of(cell: Result) -> Spread | None:
    return cell.speedup


def speed_table(cells: Sequence[Result]) -> Table:
    return matrix(cells, lambda cell: cell.tokens_per_s, lambda value: value.text(1))


def rounds_table(cells: Sequence[Result]) -> Table | None:
    """Tokens per round; None where no method has rounds."""
    having = [cell for cell in cells if cell.tokens_per_round is not None and not cell.is_plain]
    if not having:
        return None
    about = "Accepted drafts, and the target's own token."
    spread = f"{OVER_QUESTIONS} {pairing(map(rounds_of, having))}".rstrip()
    return matrix(having, rounds_of, Spread.text, spread, Spread.independent, about)


def rounds_of(cell: Result) -> Spread | None:
    return cell.tokens_per_round


def glance_table(cells: Sequence[Result], widest_tie: float | None = None) -> Table:
    """Every method at its best budget, over all tasks. Tokens closer than `widest_tie` are a tie."""
    rows, speedups, others = [], [], []
    asked = {method: num_asked(own) for method, own in by_method(cells).items()}
    unlike = len(set(asked.values())) > 1
    tasks = {cell.task for cell in cells}
    graded = {task: max((c.score.graded for c in cells if c.task == task and c.score), default=0) for task in tasks}
    for method, own in groupby(at_best(in_order(cells)), key=lambda cell: cell.method):
        group = list(own)
        speed = over_tasks([cell.tokens_per_s for cell in group], len(tasks))
        speedup = None if method == PLAIN else over_tasks([c.speedup for c in group], len(tasks))
        other = None if method == TRANSFORMERS else over_tasks([c.speedup_transformers for c in group], len(tasks))
        speedups.append(speedup)
        others.append(other)
        rounds = over_tasks([cell.tokens_per_round for cell in group], len(tasks), Spread.independent)
        own_graded = {cell.task: cell.score.graded for cell in group if cell.score}
        all_graded = all(own_graded.get(task, 0) == graded[task] for task in tasks)
        scores = [cell.score.share for cell in group if cell.score and all_graded]
        marks = max((cell.score.mark for cell in group if cell.score), default="")
        rows.append(
            (
                *(method, " ".join((text_of(group[0].tree), *as_good(group[0], cells)))),
                str(asked[method]) if unlike else NONE,
                speed.text(1) if speed else NONE,
                speedup_text(speedup) if speedup else NONE,
                speedup_text(other) if other else NONE,
                rounds.text() if rounds else NONE,
                Spread.independent(scores).text(3) + marks if scores else NONE,
                same_text([cell.lossless for cell in group if cell.lossless]),
                text_of(sum(len(cell.errors) for cell in group) or None),
            )
        )
    columns = (
        *("method", "best budget", "questions", "tokens/s", "speedup", "over transformers", "tokens per round"),
        *("score", "same text as plain", "failed"),
    )
    shown = {word.rstrip(",") for row in rows for cell in row for word in cell.split()}
    legend = (
        (len(tasks) > 1, "Means over tasks, of speedups geometric, and only where all tasks have a value."),
        (
            True,
            "±: standard deviation over repeats of the same questions; of tokens per round and scores, standard error"
            " over questions.",
        ),
        ("≈" in shown, "≈: not shown to differ from 1."),
        ("alike)" in shown, "Alike: within two standard deviations of the best budget, repeat by repeat."),
        (True, judged_by(speedups)),
        (judged_by(others) != judged_by(speedups), judged_by(others, "those over transformers")),
        (unlike, "Speedups over a method that was asked less are on its questions."),
        (bool(shown & {"tie", "ties"}), tie_legend(widest_tie)),
    )
    caption = " ".join(text for is_needed, text in legend if is_needed and text)
    return without_empty(Table(columns, tuple(rows), caption + partial_note(cells)))


def tie_legend(widest: float | None) -> str:
    width = "" if widest is None else f", here at most {widest:.3g} apart"
    return f"Ties: texts that part where rounding decides between two tokens{width}."


def over_tasks(
    values: Sequence[Spread | None], count: int, mean: Callable[[Iterable[Spread]], Spread] = Spread.average
) -> Spread | None:
    """None where one of so many tasks has no value: who failed on the hardest would look the better for it."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == count else None


def on_all_tasks(cells: Sequence[Result]) -> list[Result]:
    """Without methods that were asked some tasks only: what they do there is not what they do on all."""
    tasks = {cell.task for cell in cells}
    whole = {method for method, own in by_method(cells).items() if {cell.task for cell in own} == tasks}
    return [cell for cell in cells if cell.method in whole]


def by_method(cells: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for cell in cells:
        found.setdefault(cell.method, []).append(cell)
    return found


def num_asked(cells: Iterable[Result]) -> int:
    """How many a method was asked, over all tasks."""
    return sum({cell.task: cell.questions for cell in cells}.values())


def same_text(checks: Sequence[Lossless]) -> str:
    """How many texts are those of plain decoding, and what the others are."""
    if not checks:
        return NONE
    ties, mistakes = sum(c.ties for c in checks), sum(c.mistakes for c in checks)
    same = f"{sum(c.identical for c in checks)}/{sum(c.compared for c in checks)}"
    rest = ((count, word) for count, word in ((ties, "tie"), (mistakes, "mistake")) if count)
    return ", ".join([same, *(f"{count} {word}{'s' if count > 1 else ''}" for count, word in rest)])


def at_best(cells: Sequence[Result]) -> list[Result]:
    """Every method with its best budget only: the fastest over the tasks, of those with the fewest failures."""
    best = {}
    for method, own in by_method(cells).items():
        budgets = by_budget(own)
        if any(cell.tokens_per_s for cell in own):
            best[method] = max(budgets, key=lambda b: (-len(failures(budgets[b])), mean_speed(budgets[b]).mean))
    return [cell for cell in cells if cell.method in best and cell.budget == best[cell.method]]


def as_good(best: Result, cells: Sequence[Result]) -> list[str]:
    """The other budgets of a method whose speed over the tasks, or speedup, is near that of the best."""
    budgets = by_budget(by_method(cells)[best.method])
    top = budgets.pop(best.budget)
    alike = [
        str(budget)
        for budget, own in budgets.items()
        if failures(own) == failures(top) and any(mean(top).is_near(mean(own)) for mean in (mean_speed, asked_speedup))
    ]
    return [f"({', '.join(alike)} alike)"] if alike else []


def by_budget(cells: Iterable[Result]) -> dict[int | None, list[Result]]:
    found: dict[int | None, list[Result]] = {}
    for cell in cells:
        found.setdefault(cell.budget, []).append(cell)
    return found


def mean_speed(cells: Iterable[Result]) -> Spread:
    """Over the tasks on which there is one."""
    speeds = [cell.tokens_per_s for cell in cells if cell.tokens_per_s is not None]
    return Spread.average(speeds) if speeds else Spread(0.0)


def asked_speedup(cells: Iterable[Result]) -> Spread:
    """Likewise how much faster than plain decoding, with its error over questions; near nothing where that is not
    known."""
    speedups = [cell.speedup for cell in cells if cell.speedup is not None]
    mean = Spread.average(speedups) if speedups else None
    return mean.questions if mean and mean.questions else Spread(0.0)


def failures(cells: Iterable[Result]) -> set[tuple[str, str, int]]:
    """Task, question and repeat of answers that failed."""
    return {(cell.task, *place) for cell in cells for place in cell.failed}


CELL_COLUMNS = (
    *("method", "task", "temp", "budget", "batch", "tokens/s", "tokens/round", "speedup"),
    *("over transformers", "score", "same text", "failed"),
)
DETAIL_COLUMNS = ("a round in plain steps", "prefill s per question", "questions", "tokens")


def cells_table(runs: Sequence[Run], details: bool = False) -> Table:
    """Everything that was measured: a row per cell, under the name of its run where there are several."""
    named = len(runs) > 1
    rows = [
        ((run.name,) if named else ()) + _cell_row(cell) + (_detail_row(cell) if details else ())
        for run in runs
        for cell in in_order(run.cells)
    ]
    columns = (("run",) if named else ()) + CELL_COLUMNS + (DETAIL_COLUMNS if details else ())
    return without_empty(Table(columns, tuple(rows), first_number=3 if named else 2))


def _cell_row(cell: Result) -> tuple[str, ...]:
    score = cell.score
    return (
        *(cell.method, cell.task, f"{cell.temperature:g}", text_of(cell.tree), cell.batch_text),
        *(text_of(cell.tokens_per_s, 1), text_of(cell.tokens_per_round)),
        speedup_text(cell.speedup) if cell.speedup and not cell.is_plain else NONE,
        speedup_text(cell.speedup_transformers) if cell.speedup_transformers and cell.method != TRANSFORMERS else NONE,
        f"{score.correct}/{score.graded}{score.mark}" if score else NONE,
        same_text([cell.lossless] if cell.lossless else []),
        str(len(cell.errors)) if cell.errors else NONE,
    )


def _detail_row(cell: Result) -> tuple[str, ...]:
    return (
        text_of(cell.round_cost),
        text_of(cell.prefill_s.times(1 / cell.questions) if cell.prefill_s else None, 4),
        *(str(cell.questions), str(cell.tokens)),
    )


def paper_table(pairs: Sequence[Pair]) -> Table:
    """Ours beside the paper's, for pairs of one of its tables. What all rows share stands in the caption."""
    remarks, rows = remarks_of(pairs), []
    for pair in sorted(pairs, key=lambda p: p.cell.task):
        cell, row = pair.cell, pair.row
        rows.append(
            (
                *(cell.task, cell.method, row.method, f"{cell.temperature:g}", text_of(cell.tree), str(cell.batch)),
                *(speedup_text(cell.speedup) if cell.speedup else NONE, text_of(row.speedup)),
                *(text_of(cell.tokens_per_round), text_of(row.tokens_per_round)),
                *(text_of(cell.tokens_per_s, 1), text_of(row.tokens_per_s, 1)),
                f"({1 + remarks.index(pair.remark)})" if pair.remark else NONE,
            )
        )
    columns = (
        *("task", "method", "in the paper", "temperature", "budget", "batch", "speedup", "paper's"),
        *("tokens per round", "paper's", "tokens/s", "paper's", "remark"),
    )
    return without_constant(without_empty(Table(columns, tuple(rows), first_number=3)), ("temperature", "batch"))


def remarks_of(pairs: Sequence[Pair]) -> list[str]:
    """What is to be said of some of them, each once."""
    return list(dict.fromkeys(pair.remark for pair in sorted(pairs, key=lambda p: p.cell.task) if pair.remark))


def without_constant(table: Table, names: Sequence[str]) -> Table:
    """Without those of the named columns that are the same in all rows; the caption tells."""
    values = {name: {row[table.columns.index(name)] for row in table.rows} for name in names if name in table.columns}
    same = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    keep = [c for c, name in enumerate(table.columns) if name not in same]
    told = ", ".join(f"{name} {value}" for name, value in same.items())
    return replace(
        table,
        columns=tuple(table.columns[c] for c in keep),
        rows=tuple(tuple(row[c] for c in keep) for row in table.rows),
        caption=" ".join(filter(None, (f"All at {told}." if told else "", table.caption))),
    )


def against_table(a: Run, b: Run) -> Table:
    """Cells that both runs have. Two runs took no turns, so the verdict is on what each gains over its own plain
    decoding, and the rows of plain decoding show how far the machines were alike."""
    rows = []
    for cell in in_order(a.cells):
        other = b.cell(cell.key)
        if other is None:
            continue
        mine, its = cell.tokens_per_s, other.tokens_per_s
        gains = (None, None) if cell.is_plain else (cell.speedup, other.speedup)
        rows.append(
            (
                *(cell.task, cell.method, f"{cell.temperature:g}", text_of(cell.tree), str(cell.batch)),
                *(text_of(mine, 1), text_of(its, 1), its.over(mine).text() if mine and its else NONE),
                *(speedup_text(gain) if gain else NONE for gain in gains),
                NONE if cell.is_plain else verdict(*gains),
                *(text_of(cell.tokens_per_round), text_of(other.tokens_per_round)),
                *(_share(cell), _share(other)),
            )
        )
    columns = (
        *("task", "method", "temperature", "budget", "batch", "A tokens/s", "B tokens/s", "B over A"),
        *("A speedup", "B speedup", "verdict", "A tokens per round", "B tokens per round", "A score", "B score"),
    )
    caption = (
        "The two runs took no turns: tokens/s differ by what the machine did, too, as those of plain decoding show. The"
        " verdict is on the speedups, each over the plain decoding of its own run."
    )
    return without_empty(Table(columns, tuple(rows), caption, first_number=2))


def verdict(a: Spread | None, b: Spread | None) -> str:
    """On two speedups."""
    if a is None or b is None:
        return "not compared"
    differs = a.log().differs(b.log())
    if differs is None:
        return "spread unknown"
    return ("B gains more" if b.mean > a.mean else "A gains more") if differs else NO_DIFFERENCE


def _share(cell: Result) -> str:
    return cell.score.share.text(3) + cell.score.mark if cell.score else NONE


def head_table(head: HeadRecord) -> Table:
    """Teacher-forced tokens per round, a column per tree."""
    rows = [(task, *map(text_of, row.values())) for task, row in (*head.tokens_per_round.items(), ("mean", head.mean))]
    return Table(("task", *head.mean), tuple(rows), "Tokens per round on the target's own text.")


def cost_table(record: CostRecord, beside_paper: bool) -> Table:
    """What a drafted token costs, and what it costs in the paper at the same context and depth."""
    _, paper = paper_costs()
    rows = [
        (
            *(str(c.context), str(c.depth), str(c.budget), str(c.batch), c.draft_ms.text(3), c.verify_ms.text(3)),
            *(c.c_percent.text(3), text_of(paper.get((c.context, c.depth)) if beside_paper else None, 3)),
        )
        for c in record.costs
    ]
    columns = ("context", "depth", "budget", "batch", "draft ms", "verify ms", "c in %", "paper's")
    caption = "c: time of a draft pass over the tokens that it drafts and the time of a verify pass."
    return without_empty(Table(columns, tuple(rows), caption, first_number=0))
