"""Tables of a report, from the cells of runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import groupby
from typing import Any, Literal

import pandas as pd
from scipy import stats

from benchmarks.document import NONE, make_table
from benchmarks.estimate import NO_DIFFERENCE, Estimate, how_many, speedup_text
from benchmarks.grade import MATH_TASKS
from benchmarks.paper import SHAPES, Pair, paper_costs
from benchmarks.recipe import KINDS, PLAIN, TRANSFORMERS, Cell
from benchmarks.results import PARTIAL_NOTE, RESULTS_FILE, DraftCost, Record, Result, Run, Score
from benchmarks.tasks import BUILTIN

Form = Literal["md", "csv", "json", "jsonl"]
Field = Literal["tokens_per_s", "speedup", "speedup_transformers", "tokens_per_round"]
"""A value of a cell."""
BOLD = "Bold: the best of a column, and all less than two standard deviations of their difference behind it."
OVER_REPEATS = f"Mean ± standard deviation over repeats of the same questions. {BOLD}"
OVER_QUESTIONS = f"Mean ± standard error over questions. {BOLD}"
RARE = 0.01
"""Probability under which chance alone is ruled out."""
MOST_DIFFERENCES = 300
"""Differences listed in a report; in 16 bits most texts part from plain ones at a tie, sooner or later."""
LOSSLESS_COUNTS = ("compared", "identical", "ties", "mistakes")


def text_of(value: Estimate | float | int | str | None, digits: int = 2) -> str:
    if value is None:
        return NONE
    if isinstance(value, Estimate):
        return value.text(digits)
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def text_of_speedup(value: Estimate | None) -> str:
    return speedup_text(value) if value else NONE


def place_of(cell: Result) -> dict[str, str]:
    """Columns of the setting of a cell."""
    setting = {"temperature": f"{cell.temperature:g}", "budget": text_of(cell.tree), "batch": str(cell.batch)}
    return {"task": cell.task, "method": cell.method, **setting}


def numbered(indices: Iterable[int]) -> str:
    """Indices counted from 1."""
    return ", ".join(str(index + 1) for index in indices)


# -- cells, grouped


def in_order(cells: Iterable[Result]) -> list[Result]:
    """Cells by temperature, batch, method as first seen, and budget."""
    cells = list(cells)
    rank = {method: i for i, method in enumerate(dict.fromkeys(cell.method for cell in cells))}
    return sorted(cells, key=lambda c: (c.temperature, c.batch, rank[c.method], c.budget or 0))


def groups_of(cells: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    """Cells of one temperature and batch size, which share a table."""
    groups = groupby(in_order(cells), key=lambda c: (c.temperature, c.batch))
    return [(f"temperature {temperature:g}, batch {batch}", list(group)) for (temperature, batch), group in groups]


def by_key(key: str, cells: Iterable[Result]) -> dict[Any, list[Result]]:
    found: dict[Any, list[Result]] = {}
    for cell in cells:
        found.setdefault(getattr(cell, key), []).append(cell)
    return found


by_method, by_budget = partial(by_key, "method"), partial(by_key, "budget")


def merged(
    rows: Iterable[Mapping[str, Any]], column: str, join: Callable[[list[Any]], str] = ", ".join
) -> list[dict[str, str]]:
    """Rows that differ in one column alone become one, whose values there are joined."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(text for name, text in row.items() if name != column), []).append(row)
    return [{**alike[0], column: join([row[column] for row in alike])} for alike in found.values()]


def known(cells: Iterable[Result], field: Field) -> list[Estimate]:
    return [value for cell in cells if (value := getattr(cell, field)) is not None]


def over_tasks(cells: Iterable[Result], field: Field, tasks: int) -> Estimate | None:
    """Mean over tasks. None where one has no value: a failure on the hardest would raise the mean."""
    values = known(cells, field)
    mean = Estimate.independent if field == "tokens_per_round" else Estimate.average
    return mean(values) if len(values) == tasks else None


def on_all_tasks(cells: Sequence[Result]) -> list[Result]:
    """Cells of methods that were asked all tasks."""
    tasks = {cell.task for cell in cells}
    whole = {method for method, own in by_method(cells).items() if {cell.task for cell in own} == tasks}
    return [cell for cell in cells if cell.method in whole]


def at_best(cells: Sequence[Result]) -> list[Result]:
    """Cells of each method's best budget: the fastest over the tasks, of those with the fewest failures."""
    best = {}
    for method, own in by_method(cells).items():
        budgets = by_budget(own)
        if known(own, "tokens_per_s"):
            best[method] = max(budgets, key=lambda b: (-len(failures(budgets[b])), mean_speed(budgets[b]).mean))
    return [cell for cell in cells if cell.method in best and cell.budget == best[cell.method]]


def near_best(best: Result, cells: Sequence[Result]) -> list[str]:
    """Other budgets of a method whose speed over the tasks, or speedup, is near that of the best."""
    budgets = by_budget(by_method(cells)[best.method])
    top = budgets.pop(best.budget)
    alike = [
        str(budget)
        for budget, own in budgets.items()
        if failures(own) == failures(top) and any(mean(top).is_near(mean(own)) for mean in (mean_speed, mean_speedup))
    ]
    return [f"({', '.join(alike)} alike)"] if alike else []


def mean_speed(cells: Iterable[Result]) -> Estimate:
    """Speed over the tasks that have one."""
    speeds = known(cells, "tokens_per_s")
    return Estimate.average(speeds) if speeds else Estimate(0.0)


def mean_speedup(cells: Iterable[Result]) -> Estimate:
    """Speedup over plain decoding with its error over questions; near nothing where that is not known."""
    speedups = known(cells, "speedup")
    return Estimate.average(speedups).questions or Estimate(0.0) if speedups else Estimate(0.0)


def failures(cells: Iterable[Result]) -> set[tuple[str, str, int]]:
    """Task, question and repeat of answers that failed."""
    return {(cell.task, *place) for cell in cells for place in cell.failed}


# -- by task


def task_tables(cells: Sequence[Result]) -> dict[str, str]:
    """Speedups, speeds and tokens per round by task, as far as cells have them."""
    faster = [cell for cell in cells if cell.speedup and not cell.is_plain]
    counted = [cell for cell in cells if cell.tokens_per_round is not None and not cell.is_plain]
    speedups, rounds = known(faster, "speedup"), known(counted, "tokens_per_round")
    spread = (OVER_REPEATS, "≈: not shown to differ from plain decoding.", judged_by(speedups), pairing(speedups))
    about = "Accepted drafts, and the target's own token."
    made = {
        "Speedup over plain decoding": matrix(faster, "speedup", speedup_text, spread),
        "Tokens per second": matrix(cells, "tokens_per_s", lambda value: value.text(1), (OVER_REPEATS,)),
        "Tokens per round": matrix(
            counted, "tokens_per_round", Estimate.text, (OVER_QUESTIONS, pairing(rounds)), about
        ),
    }
    return {title: table for title, table in made.items() if table}


def matrix(
    cells: Sequence[Result], field: Field, show: Callable[[Estimate], str], spread: Iterable[str], about: str = ""
) -> str:
    """A row per method and budget, a column per task, and one for their mean where there are several."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    rows, columns = by_key("label", cells), dict[str, dict[str, Estimate | None]]()
    for task in tasks:
        columns[task] = {row: getattr(cell, field) for row, own in rows.items() for cell in own if cell.task == task}
    if len(tasks) > 1:
        columns["mean"] = {row: over_tasks(own, field, len(tasks)) for row, own in rows.items()}
    best = {name: _best(values) for name, values in columns.items()}
    varies = any(value and value.sd is not None for values in columns.values() for value in values.values())

    def text(name: str, row: str) -> str:
        value = columns[name].get(row)
        shown = show(value) if value else NONE
        return f"**{shown}**" if row in best[name] else shown

    texts = [{"method, budget": row, **{name: text(name, row) for name in columns}} for row in rows]
    return make_table(texts, " ".join(filter(None, (about, *(spread if varies else ())))), keep_empty=True)


def _best(column: Mapping[str, Estimate | None]) -> set[str]:
    """Rows of the highest value and those near it; none where no deviation is known."""
    varying = {row: value for row, value in column.items() if value is not None and value.sd is not None}
    best = max(varying.values(), key=lambda value: value.mean, default=None)
    return {row for row, value in varying.items() if best is not None and best.is_near(value)}


def judged_by(speedups: Sequence[Estimate], what: str = "speedups") -> str:
    """Caption: the errors that claims about speedups rest on; empty where there are none."""
    if not speedups:
        return ""
    over = [value for value in speedups if value.questions]
    if not over:
        return f"Other questions may move {what} further than repeats of these do."
    some = "" if len(over) == len(speedups) else ", where there were several"
    return f"{what[0].upper() + what[1:]} are also judged by their standard error over questions{some}."


def pairing(values: Iterable[Estimate]) -> str:
    """Caption: values are compared question by question."""
    paired = any(value.asked or (value.questions and value.questions.asked) for value in values)
    return "Methods that answered the same questions are compared question by question." if paired else ""


# -- at a glance


def glance_table(cells: Sequence[Result], widest_tie: float | None = None) -> str:
    """Every method at its best budget, over all tasks. Tokens closer than `widest_tie` are a tie."""
    asked = {method: sum({c.task: c.questions for c in own}.values()) for method, own in by_method(cells).items()}
    unlike = len(set(asked.values())) > 1
    graded = {task: most_graded(own) for task, own in by_key("task", cells).items()}
    rows, speedups, others = [], list[Estimate](), list[Estimate]()
    for method, group in by_method(at_best(in_order(cells))).items():
        speedup = None if method == PLAIN else over_tasks(group, "speedup", len(graded))
        other = None if method == TRANSFORMERS else over_tasks(group, "speedup_transformers", len(graded))
        speedups += [speedup] if speedup else []
        others += [other] if other else []
        scores = [cell.score for cell in group if cell.score]
        own_graded = {cell.task: most_graded([cell]) for cell in group}
        all_graded = scores and all(own_graded.get(task, 0) == count for task, count in graded.items())
        share = Estimate.independent(score.share for score in scores).text(3) if all_graded else NONE
        rows.append(
            {
                "method": method,
                "best budget": " ".join((text_of(group[0].tree), *near_best(group[0], cells))),
                "questions": str(asked[method]) if unlike else NONE,
                "tokens/s": text_of(over_tasks(group, "tokens_per_s", len(graded)), 1),
                "speedup": text_of_speedup(speedup),
                "over transformers": text_of_speedup(other),
                "tokens per round": text_of(over_tasks(group, "tokens_per_round", len(graded))),
                "score": share + max(score.mark for score in scores) if all_graded else NONE,
                "same text as plain": same_text(group),
                "failed": text_of(sum(len(cell.errors) for cell in group) or None),
            }
        )
    shown = {word.rstrip(",") for row in rows for cell in row.values() for word in cell.split()}
    tie_width = "" if widest_tie is None else f", here at most {widest_tie:.3g} apart"
    legend = (
        (len(graded) > 1, "Means over tasks, of speedups geometric, and only where all tasks have a value."),
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
        (shown & {"tie", "ties"}, f"Ties: texts that part where rounding decides between two tokens{tie_width}."),
        (is_partial(cells), PARTIAL_NOTE),
    )
    return make_table(rows, " ".join(text for is_needed, text in legend if is_needed and text))


def most_graded(cells: Iterable[Result]) -> int:
    return max((cell.score.graded for cell in cells if cell.score), default=0)


def is_partial(cells: Iterable[Result]) -> bool:
    """A score is marked, which needs a footnote."""
    return any(cell.score and cell.score.partial for cell in cells)


def same_text(cells: Iterable[Result]) -> str:
    """Number of texts equal to those of plain decoding, then ties and mistakes."""
    if not (checks := [cell.lossless for cell in cells if cell.lossless]):
        return NONE
    ties, mistakes = sum(c.ties for c in checks), sum(c.mistakes for c in checks)
    same = f"{sum(c.identical for c in checks)}/{sum(c.compared for c in checks)}"
    return ", ".join([same, *(how_many(n, word) for n, word in ((ties, "tie"), (mistakes, "mistake")) if n)])


# -- every cell


def cells_table(runs: Sequence[Run], details: bool = False) -> str:
    """A row per cell, under the name of its run where there are several."""
    rows = []
    for run, cell in ((each, cell) for each in runs for cell in in_order(each.cells)):
        score, prefill, speedup = cell.score, cell.prefill_s, cell.speedup
        row = {
            "run": run.name if len(runs) > 1 else NONE,
            "method": cell.method,
            "task": cell.task,
            "temp": f"{cell.temperature:g}",
            "budget": text_of(cell.tree),
            "batch": cell.batch_text,
            "tokens/s": text_of(cell.tokens_per_s, 1),
            "tokens/round": text_of(cell.tokens_per_round),
            "speedup": text_of_speedup(None if cell.is_plain else speedup),
            "over transformers": text_of_speedup(None if cell.method == TRANSFORMERS else cell.speedup_transformers),
            "score": f"{score.correct}/{score.graded}{score.mark}" if score else NONE,
            "same text": same_text([cell]),
            "failed": text_of(len(cell.errors) or None),
        }
        if details:
            # The time of a round in plain steps: its tokens over how much faster they came.
            steps = cell.tokens_per_round.mean / speedup.mean if cell.tokens_per_round and speedup else None
            row |= {
                "a round in plain steps": text_of(steps),
                "prefill s per question": text_of(prefill.times(1 / cell.questions) if prefill else None, 4),
                "questions": str(cell.questions),
                "tokens": str(cell.tokens),
            }
        rows.append(row)
    return make_table(rows, text_columns=3)


def summary(inputs: Sequence[Run], form: Form) -> str:
    """All cells of all runs for stdout; where there are no runs, costs of drafting."""
    runs = [run for run in inputs if run.cells]
    if form == "md":
        costs = [cost_table(run.costs, beside_paper=False) for run in inputs if run.costs]
        return "\n".join(f"{table}\n" for table in ([cells_table(runs)] if runs else costs))
    rows = [flat_cell(run, cell) for run in runs for cell in in_order(run.cells)]
    rows = rows or [flat_cost(run, cost) for run in inputs for cost in run.costs]
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


def flat_cell(run: Run, cell: Result) -> dict[str, Any]:
    """Numbers of a cell without nesting."""
    score = asdict(cell.score) if cell.score else {}
    rounds, lossless = cell.tokens_per_round, cell.lossless
    return {
        "run": run.name,
        "model": run.model,
        "device": run.device,
        **{field.name: getattr(cell, field.name) for field in fields(Cell)},
        **{name: getattr(cell, name) for name in ("questions", "together", "tokens")},
        **_flat("tokens_per_s", cell.tokens_per_s),
        "tokens_per_round": rounds and rounds.mean,
        "tokens_per_round_se": rounds and rounds.sd,
        **_flat("speedup", cell.speedup),
        "speedup_se_questions": cell.speedup.questions.sd if cell.speedup and cell.speedup.questions else None,
        "differs": cell.speedup.differs_from_1() if cell.speedup else None,
        **_flat("speedup_transformers", cell.speedup_transformers),
        **_flat("prefill_s", cell.prefill_s),
        **{name: score.get(name) for name in ("correct", "graded", "partial", "cut")},
        **{name: getattr(lossless, name, None) for name in ("compared", "identical", "ties", "mistakes")},
        "failed": len(cell.errors),
    }


def flat_cost(run: Run, cost: DraftCost) -> dict[str, Any]:
    found = {name: getattr(cost, name) for name in ("context", "depth", "budget", "batch")}
    for name in ("draft_ms", "verify_ms", "c_percent"):
        found |= _flat(name, getattr(cost, name), has_median=False)
    return {"run": run.name, "model": run.model, "device": run.device, **found}


def _flat(name: str, value: Estimate | None, has_median: bool = True) -> dict[str, float | None]:
    found = {name: value.mean if value else None, f"{name}_sd": value.sd if value else None}
    return found | ({f"{name}_median": value.median if value else None} if has_median else {})


# -- beside others


def paper_table(pairs: Sequence[Pair]) -> str:
    """Our cells beside rows of one of the paper's tables. A setting that all rows share goes to the caption."""
    pairs = sorted(pairs, key=lambda p: p.cell.task)
    remarks = list(dict.fromkeys(pair.remark for pair in pairs if pair.remark))
    rows = [
        {
            **dict.fromkeys(("task", "method"), ""),
            "in the paper": row.method,
            **place_of(cell),
            "speedup": text_of_speedup(cell.speedup),
            "paper's speedup": text_of(row.speedup),
            "tokens per round": text_of(cell.tokens_per_round),
            "paper's tokens per round": text_of(row.tokens_per_round),
            "tokens/s": text_of(cell.tokens_per_s, 1),
            "paper's tokens/s": text_of(row.tokens_per_s, 1),
            "remark": f"({1 + remarks.index(pair.remark)})" if pair.remark else NONE,
        }
        for pair in pairs
        for cell, row in ((pair.cell, pair.row),)
    ]
    same = {name: rows[0][name] for name in ("temperature", "batch") if len({row[name] for row in rows}) == 1}
    told = [f"All at {', '.join(f'{name} {value}' for name, value in same.items())}."] if same else []
    told += [f"({number}) {remark}." for number, remark in enumerate(remarks, 1)]
    return make_table([row | dict.fromkeys(same, NONE) for row in rows], "\n\n".join(told), text_columns=3)


def against_table(a: Run, b: Run) -> str:
    """Cells that both runs have. The verdict is on speedups, each over the plain decoding of its own run."""
    rows, others = [], {cell.key: cell for cell in b.cells}
    for cell in in_order(a.cells):
        if (other := others.get(cell.key)) is None:
            continue
        mine, its = cell.tokens_per_s, other.tokens_per_s
        gains = (None, None) if cell.is_plain else (cell.speedup, other.speedup)
        scores = (("A", cell.score), ("B", other.score))
        rows.append(
            {
                **place_of(cell),
                "A tokens/s": text_of(mine, 1),
                "B tokens/s": text_of(its, 1),
                "B over A": text_of(its.over(mine) if mine and its else None),
                "A speedup": text_of_speedup(gains[0]),
                "B speedup": text_of_speedup(gains[1]),
                "verdict": NONE if cell.is_plain else verdict(*gains),
                "A tokens per round": text_of(cell.tokens_per_round),
                "B tokens per round": text_of(other.tokens_per_round),
                **{f"{run} score": s.share.text(3) + s.mark if s else NONE for run, s in scores},
            }
        )
    return make_table(rows, text_columns=2)


def verdict(a: Estimate | None, b: Estimate | None) -> str:
    """Comparison of two speedups in words."""
    if a is None or b is None:
        return "not compared"
    differs = a.differs(b)
    if differs is None:
        return "spread unknown"
    return ("B gains more" if b.mean > a.mean else "A gains more") if differs else NO_DIFFERENCE


def head_table(head: Run) -> str:
    """Teacher-forced tokens per round, a column per tree."""
    tasks = {**head.record["tokens_per_round"], "mean": head.record["mean"]}.items()
    rows = [{"task": task, **{tree: text_of(float(row[tree])) for tree in head.record["mean"]}} for task, row in tasks]
    return make_table(rows, "Tokens per round on the target's own text.")


def cost_table(costs: Iterable[DraftCost], beside_paper: bool) -> str:
    """Cost of a drafted token, beside the paper's at the same context and depth."""
    paper = paper_costs()[1] if beside_paper else {}
    rows = [
        {
            **{name: str(getattr(cost, name)) for name in ("context", "depth", "budget", "batch")},
            "draft ms": cost.draft_ms.text(3),
            "verify ms": cost.verify_ms.text(3),
            "c in %": cost.c_percent.text(3),
            "paper's": text_of(paper.get(cost.place), 3),
        }
        for cost in costs
    ]
    return make_table(rows, text_columns=0)


# -- settings, scores, texts, failures


def names_of(cells: Sequence[Result], everyone: Iterable[Result]) -> str:
    """Methods with their budgets, as `plain; jetspec 16, 64`; all but plain decoding are `all others`."""
    setting = cells[0].temperature, cells[0].batch
    others = [cell for cell in everyone if (cell.temperature, cell.batch) == setting and not cell.is_plain]
    if len(others) > 1 and [cell.label for cell in cells] == [cell.label for cell in others]:
        return "all others"
    return "; ".join(
        " ".join((method, ", ".join(str(cell.tree) for cell in own if cell.tree is not None))).rstrip()
        for method, own in by_method(cells).items()
    )


def score_table(run: Run) -> str:
    """Shares of right answers beside those of plain decoding; methods of equal rows share one."""
    graded = sorted(in_order(cell for cell in run.cells if cell.score), key=lambda cell: cell.task)
    plain_scores = {(c.task, c.temperature, c.batch): c.score for c in graded if c.is_plain}
    rows = []
    for cell in graded:
        assert cell.score is not None
        score, plain = cell.score, plain_scores.get((cell.task, cell.temperature, cell.batch))
        rows.append(
            {
                "task": cell.task,
                "method": cell,
                "temperature": f"{cell.temperature:g}",
                "batch": str(cell.batch),
                "metric": metric_of(cell.task),
                "n": str(score.graded),
                "cut": str(score.cut),
                "value": f"{score.share.mean:.4f}{score.mark}",
                "stderr": f"± {text_of(score.share.sd, 4)}",
                "against plain": NONE if cell.is_plain or plain is None else score_verdict(score, plain),
            }
        )

    def names(cells: list[Result]) -> str:
        return names_of(cells, by_key("task", graded)[cells[0].task])

    return make_table(merged(rows, "method", names), text_columns=5, wraps=True, keep_empty=True)


def metric_of(task: str) -> str:
    if task in MATH_TASKS:
        return "exact_match"
    return "exact_match, pass@1" if task == BUILTIN else "pass@1"


def score_verdict(score: Score, plain: Score) -> str:
    """Comparison with plain decoding question by question, by a sign test."""
    right, plain_right = set(score.right), set(plain.right)
    if right.union(score.wrong) != plain_right.union(plain.wrong):
        return "other questions"  # some failed, or a method was asked fewer
    won, lost = len(right - plain_right), len(plain_right - right)
    if not won and not lost:
        return "same"
    difference = f"{score.share.mean - plain.share.mean:+.4f}, {won} won, {lost} lost"
    is_rare = stats.binomtest(won, won + lost).pvalue < RARE
    return difference if is_rare else f"{difference} ({NO_DIFFERENCE})"


def methods_table(run: Run) -> str:
    """Kind, head and trees of every method. Empty: the record does not tell."""
    methods = [found for name in dict.fromkeys(cell.method for cell in run.cells) if (found := run.method(name))]
    rows = [
        {
            "method": method["name"],
            "kind": method["kind"],
            "head or assistant": method.get("head") or method.get("assistant") or NONE,
            "trees": trees_text(method) or NONE,
            "remarks": " ".join(filter(None, (method["about"], asked_text(method)))) or NONE,
        }
        for method in methods
    ]
    return make_table(rows, text_columns=5, wraps=True)


def heads_table(run: Run) -> str:
    """Training of each head, from its card."""
    names = ("data", "steps", "batch per process", "optimizer")
    rows = [
        {"method": method, **{key: head.get(key, NONE) for key in names}, "commit": head.get("commit", NONE)[:7]}
        for method, head in (run.record.get("heads") or {}).items()
    ]
    return make_table(rows, text_columns=6, wraps=True)


def unlike_heads(run: Run) -> str | None:
    """Warning for heads trained on other data or for other steps than the rest."""
    heads = run.record.get("heads") or {}
    if len({(head.get("data"), head.get("steps")) for head in heads.values()}) < 2:
        return None
    told = [f"{name}: {head.get('steps', 'unknown')} steps, {head.get('data', NONE)}" for name, head in heads.items()]
    return f"the heads were not all trained alike: {'; '.join(told)}."


def asked_text(method: Record) -> str:
    """Restriction of a method to some questions, temperatures or tasks."""
    parts = [f"{how_many(method['limit'], 'question')} of every task"] if method.get("limit") else []
    parts += [f"temperature {t:g}" for t in method.get("temperatures") or ()]
    parts += [f"task {task}" for task in method.get("tasks") or ()]
    return f"Asked only: {', '.join(parts)}." if parts else ""


def trees_text(method: Record) -> str:
    """Budgets of one shape together: `16: width 1; 64, 256: width 7, all children of the best nodes`."""
    rows = []
    takes = KINDS[method["kind"]].takes if method["kind"] in KINDS else ()
    for tree in method["trees"] if method["kind"] != PLAIN else ():
        draft_temperature = tree.get("draft_temperature", 1)
        shape = (
            (True, f"width {tree['width']}"),
            (tree["depth"] is not None, f"depth {tree['depth']}"),
            (tree["expand"] == "paper" and tree["width"] > 1, SHAPES["paper"]),
            (tree["score"] != "accum_logp", f"score {tree['score']}"),
            (tree["entropy_weight"], f"weight {tree['entropy_weight']:g}"),
            ("draft_temperature" in takes and draft_temperature != 1, f"draft temperature {draft_temperature:g}"),
            ("shortlist" in takes, f"shortlist {tree['shortlist'] or 'all'}"),
            ("shortlist" in takes, f"parents {tree.get('shortlist_parents', 0)}"),
            (tree.get("batch_trees"), "smaller in large batches"),
        )
        told = ", ".join(text for is_told, text in shape if is_told)
        rows.append({"budgets": str(tree["budget"]), "shape": told})
    return "; ".join(f"{row['budgets']}: {row['shape']}" for row in merged(rows, "budgets"))


def lossless_table(run: Run) -> str:
    """Texts over all tasks; methods of equal rows share one."""
    compared = in_order(cell for cell in run.cells if cell.lossless and not cell.is_plain)
    rows, everyone = [], list[Result]()
    for _, group in groupby(compared, key=lambda c: (c.temperature, c.batch, c.label)):
        cell, *others = group
        everyone.append(cell)
        checks = [each.lossless for each in (cell, *others) if each.lossless]
        gaps = [d["gap"] for check in checks for d in check.different if d["gap"] is not None]
        rows.append(
            {
                "method, budget": cell,
                "temperature": f"{cell.temperature:g}",
                "batch": str(cell.batch),
                "check": checks[0].check,
                **{name: str(sum(getattr(check, name) for check in checks)) for name in LOSSLESS_COUNTS},
                "widest gap": f"{max(gaps):.4g}" if gaps else NONE,
            }
        )
    lines = merged(rows, "method, budget", lambda cells: names_of(cells, everyone))
    return make_table(lines, text_columns=4, wraps=True, keep_empty=True)


def differences_table(run: Run) -> str:
    """Texts that differ from the plain one: mistakes first, then the widest gaps."""
    found = [(cell, d) for cell in run.cells if cell.lossless for d in cell.lossless.different]
    found.sort(key=lambda one: (one[1]["tie"], -(one[1]["gap"] or 0.0)))
    rows = [
        {
            "question": str(d["id"]),
            "method": cell.label,
            "temperature": f"{cell.temperature:g}",
            "batch": str(cell.batch),
            "repeats": numbered(d["repeats"]),
            "turn": numbered([d["turn"]]),
            "token": numbered([d["position"]]),
            "gap": text_of(d["gap"], 4),
            "least gap": text_of(d["least"], 4),
            "moved": text_of(d.get("moved"), 4),
            "verdict": d["why"] or ("tie" if d["tie"] else "mistake"),
        }
        for cell, d in found[:MOST_DIFFERENCES]
    ]
    told = f"The first {len(rows)} of {len(found)}: mistakes, then the widest. All are in {RESULTS_FILE}."
    return make_table(rows, told if len(rows) < len(found) else "", text_columns=2)


def errors_table(run: Run) -> str:
    """Every failure once, with the repeats in which it came."""
    rows = [
        {
            "task": cell.task,
            "question": error["id"],
            "method": cell.label,
            "temperature": f"{cell.temperature:g}",
            "batch": str(cell.batch),
            "repeats": error["repeat"],
            "failure": error["error"],
        }
        for cell in run.cells
        for error in cell.errors
    ]
    return make_table(merged(rows, "repeats", numbered), text_columns=7, wraps=True)
