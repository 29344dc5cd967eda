"""Tables of what to believe: how methods were set, scores, texts that are plain decoding's or not, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from jetspec.bench.document import Table
from jetspec.bench.grade import MATH_TASKS
from jetspec.bench.paper import SHAPES
from jetspec.bench.recipe import KINDS, PLAIN
from jetspec.bench.runs import Result, Run, Score, partial_note
from jetspec.bench.spread import NO_DIFFERENCE
from jetspec.bench.tables import NONE, in_order, text_of, without_empty
from jetspec.bench.tasks import BUILTIN

COUNTS = ("compared", "identical", "ties", "mistakes")


def score_table(run: Run) -> Table | None:
    """Right answers, with their standard error, beside those of plain decoding; None where nothing was graded."""
    graded = [cell for cell in run.cells if cell.score]
    if not graded:
        return None
    rows = []
    for cell in sorted(in_order(graded), key=lambda c: c.task):
        assert cell.score is not None
        plain = _plain_score(graded, cell)
        share = cell.score.share
        verdict = NONE if cell.is_plain or plain is None else _score_verdict(cell.score, plain)
        rows.append(
            (
                *(
                    cell.task,
                    cell.method,
                    text_of(cell.budget),
                    f"{cell.temperature:g}",
                    str(cell.batch),
                    metric_of(cell.task),
                ),
                *(
                    str(cell.score.graded),
                    str(cell.score.cut),
                    f"{share.mean:.4f}{cell.score.mark}",
                    f"± {text_of(share.sd, 4)}",
                    verdict,
                ),
            )
        )
    columns = (
        "task",
        "method",
        "budget",
        "temperature",
        "batch",
        "metric",
        "n",
        "cut",
        "value",
        "stderr",
        "against plain",
    )
    caption = "value: share of right answers, with its standard error. cut: answers that the limit of tokens ended."
    return Table(columns, tuple(rows), caption + partial_note(graded), first_number=6)


def metric_of(task: str) -> str:
    if task in MATH_TASKS:
        return "exact_match"
    return "exact_match, pass@1" if task == BUILTIN else "pass@1"


def _plain_score(cells: Iterable[Result], cell: Result) -> Score | None:
    """Of plain decoding on the same task in the same way."""
    setting = (PLAIN, cell.task, cell.temperature, cell.batch)
    return next((c.score for c in cells if (c.method, c.task, c.temperature, c.batch) == setting), None)


def _score_verdict(score: Score, plain: Score) -> str:
    if score.graded != plain.graded:
        return "other questions"  # some failed, or a method was asked fewer
    if score.correct == plain.correct:
        return "same"
    difference = score.share.mean - plain.share.mean
    return f"{difference:+.4f}" if score.share.differs(plain.share) else f"{difference:+.4f} ({NO_DIFFERENCE})"


def methods_table(run: Run) -> Table | None:
    """What was set up under every name; None where the record does not say."""
    methods = [found for name in dict.fromkeys(cell.method for cell in run.cells) if (found := run.method(name))]
    rows = [
        (
            *(method["name"], method["kind"], method.get("head") or method.get("assistant") or NONE),
            *(trees_text(method) or NONE, " ".join(filter(None, (method["about"], asked_text(method)))) or NONE),
        )
        for method in methods
    ]
    columns = ("method", "kind", "head or assistant", "trees", "to know")
    return without_empty(Table(columns, tuple(rows), first_number=len(columns), wraps=True)) if rows else None


def asked_text(method: Mapping[str, Any]) -> str:
    """What a method was not asked that others were."""
    parts = [f"the first {method['limit']} of every task"] if method.get("limit") else []
    parts += [f"temperature {t:g}" for t in method.get("temperatures") or ()]
    return f"Asked only: {', '.join(parts)}." if parts else ""


def trees_text(method: Mapping[str, Any]) -> str:
    """Budgets of one shape together: `16: width 1; 64, 256: width 7, all children of the best nodes`."""
    budgets: dict[str, list[str]] = {}
    takes = KINDS[method["kind"]].takes if method["kind"] in KINDS else ()
    for tree in method["trees"] if method["kind"] != PLAIN else ():
        shape = [f"width {tree['width']}"]
        shape += [f"depth {tree['depth']}"] if tree["depth"] is not None else []
        shape += [SHAPES["paper"]] if tree["expand"] == "paper" and tree["width"] > 1 else []
        shape += [f"score {tree['score']}"] if tree["score"] != "accum_logp" else []
        shape += [f"weight {tree['entropy_weight']:g}"] if tree["entropy_weight"] else []
        shape += [f"heat {tree['heat']:g}"] if "heat" in takes and tree.get("heat", 1) != 1 else []
        if "shortlist" in takes:
            shape += [f"shortlist {tree['shortlist'] or 'all'}", f"likely {tree.get('likely', 0)}"]
        budgets.setdefault(", ".join(shape), []).append(str(tree["budget"]))
    return "; ".join(f"{', '.join(some)}: {shape}" for shape, some in budgets.items())


def lossless_table(run: Run) -> Table | None:
    """Per method and setting, over all tasks; None where nothing was compared."""
    compared = in_order(cell for cell in run.cells if cell.lossless and not cell.is_plain)
    if not compared:
        return None
    rows = []
    for (temperature, batch, label), group in groupby(compared, key=lambda c: (c.temperature, c.batch, c.label)):
        checks = [cell.lossless for cell in group if cell.lossless]
        gaps = [check.widest_gap for check in checks if check.widest_gap is not None]
        counts = [sum(getattr(check, name) for check in checks) for name in COUNTS]
        rows.append(
            (
                *(label, f"{temperature:g}", str(batch), checks[0].check, *map(str, counts)),
                f"{max(gaps):.4g}" if gaps else NONE,
            )
        )
    columns = ("method, budget", "temperature", "batch", "check", *COUNTS, "widest gap")
    caption = (
        "Beside plain decoding; a greedy answer counts once, however often it was repeated. Gap: how far apart the "
        "target holds the two tokens where a text first differs."
    )
    if run.widest_tie is not None:
        limit = f"{run.widest_tie:.3g}"
        caption += (
            f" Ties: at most {limit} apart, which rounding as measured in this run may decide. Mistakes: the rest."
        )
    return Table(columns, tuple(rows), caption)


def differences_table(run: Run) -> Table | None:
    """Every text that differs from the plain one."""
    rows = [
        (
            *(str(d["id"]), cell.label, f"{cell.temperature:g}", str(cell.batch), numbered(d["repeats"])),
            *(numbered([d["turn"]]), numbered([d["position"]]), text_of(d["gap"], 4)),
            d["why"] or ("tie" if d["tie"] else "mistake"),
        )
        for cell in run.cells
        if cell.lossless
        for d in cell.lossless.different
    ]
    columns = ("question", "method", "temperature", "batch", "repeats", "turn", "token", "gap", "verdict")
    return without_empty(Table(columns, tuple(rows), first_number=2)) if rows else None


def numbered(indices: Iterable[int]) -> str:
    """As people count: from 1."""
    return ", ".join(str(index + 1) for index in indices)


def errors_table(run: Run) -> Table | None:
    rows = [
        (cell.task, cell.label, f"{cell.temperature:g}", str(cell.batch), _error_text(error))
        for cell in run.cells
        for error in cell.errors
    ]
    return (
        Table(("task", "method", "temperature", "batch", "failure"), tuple(rows), first_number=9, wraps=True)
        if rows
        else None
    )


def _error_text(error: object) -> str:
    if isinstance(error, dict):
        return f"{error.get('id', '')}: {error.get('error', error)}".removeprefix(": ")
    return str(error)
