"""Tables of what to believe: how methods were set, scores, texts that are plain decoding's or not, what failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.document import Table
from benchmarks.grade import MATH_TASKS
from benchmarks.paper import SHAPES
from benchmarks.recipe import KINDS, PLAIN
from benchmarks.runs import RESULTS_FILE, Result, Run, Score, partial_note
from benchmarks.spread import NO_DIFFERENCE, how_many
from benchmarks.tables import NONE, by_method, in_order, text_of, without_empty
from benchmarks.tasks import BUILTIN

COUNTS = ("compared", "identical", "ties", "mistakes")
ONCE_IN = 0.01
"""What chance alone does less often than this is a difference."""
MOST_DIFFERENCES = 300
"""Listed in a report; in 16 bits most texts part from plain ones at a tie, sooner or later."""


def score_table(run: Run) -> Table | None:
    """Right answers, with their standard error, beside those of plain decoding; None where nothing was graded.

    Methods of which all the same is to be said share a row.
    """
    graded = [cell for cell in run.cells if cell.score]
    if not graded:
        return None
    rows: dict[tuple[str, ...], list[Result]] = {}
    for cell in sorted(in_order(graded), key=lambda c: c.task):
        assert cell.score is not None
        plain, share = _plain_score(graded, cell), cell.score.share
        verdict = NONE if cell.is_plain or plain is None else score_verdict(cell.score, plain)
        row = (
            *(cell.task, f"{cell.temperature:g}", str(cell.batch), metric_of(cell.task)),
            *(str(cell.score.graded), str(cell.score.cut), f"{share.mean:.4f}{cell.score.mark}"),
            *(f"± {text_of(share.sd, 4)}", verdict),
        )
        rows.setdefault(row, []).append(cell)
    columns = ("task", "method", "temperature", "batch", "metric", "n", "cut", "value", "stderr", "against plain")
    caption = (
        "value: share of right answers. stderr: its standard error by Laplace's rule, (correct + 1) of (n + 2). cut:"
        " answers that the limit of tokens ended. against plain: same where the same questions were answered right;"
        " else the difference, and how many questions were won and lost."
    )
    everyone = in_order(graded)
    lines = tuple(
        (task, names_of(cells, [cell for cell in everyone if cell.task == task]), *rest)
        for (task, *rest), cells in rows.items()
    )
    return Table(columns, lines, caption + partial_note(graded), first_number=5, wraps=True)


def names_of(cells: Sequence[Result], everyone: Iterable[Result]) -> str:
    """Methods with their budgets: `plain; jetspec 16, 64`. All but plain decoding, of those at the same temperature and
    batch size, need no list."""
    setting = cells[0].temperature, cells[0].batch
    others = [cell for cell in everyone if (cell.temperature, cell.batch) == setting and not cell.is_plain]
    if len(others) > 1 and [cell.label for cell in cells] == [cell.label for cell in others]:
        return "all others"
    return "; ".join(
        " ".join((method, ", ".join(str(cell.tree) for cell in own if cell.tree is not None))).rstrip()
        for method, own in by_method(cells).items()
    )


def metric_of(task: str) -> str:
    if task in MATH_TASKS:
        return "exact_match"
    return "exact_match, pass@1" if task == BUILTIN else "pass@1"


def _plain_score(cells: Iterable[Result], cell: Result) -> Score | None:
    """Of plain decoding on the same task in the same way."""
    setting = (PLAIN, cell.task, cell.temperature, cell.batch)
    return next((c.score for c in cells if (c.method, c.task, c.temperature, c.batch) == setting), None)


def score_verdict(score: Score, plain: Score) -> str:
    """Question by question, as both were asked the same."""
    if score.right | score.wrong != plain.right | plain.wrong:
        return "other questions"  # some failed, or a method was asked fewer
    won, lost = len(score.right - plain.right), len(plain.right - score.right)
    if not won and not lost:
        return "same"
    difference = f"{score.share.mean - plain.share.mean:+.4f}, {won} won, {lost} lost"
    return difference if sign_test(won, lost) < ONCE_IN else f"{difference} ({NO_DIFFERENCE})"


def sign_test(won: int, lost: int) -> float:
    """How probable it is that chance alone parts as many, or more, as unevenly."""
    count = won + lost
    return min(1.0, 2 * sum(math.comb(count, i) for i in range(min(won, lost) + 1)) / 2**count)


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
    columns = ("method", "kind", "head or assistant", "trees", "remarks")
    return without_empty(Table(columns, tuple(rows), first_number=len(columns), wraps=True)) if rows else None


TRAINED = ("data", "steps", "batch per process", "optimizer", "commit")
"""What cards tell of how heads were trained; the record has their commands, too."""


def heads_table(run: Run) -> Table | None:
    """How heads were trained, as their cards tell; None where there are none."""
    heads = run.record.get("heads") or {}
    rows = tuple(
        (method, *(head.get(key, NONE) for key in TRAINED[:-1]), head.get("commit", NONE)[:7])
        for method, head in heads.items()
    )
    return without_empty(Table(("method", *TRAINED), rows, first_number=1 + len(TRAINED), wraps=True)) if rows else None


def unlike_heads(run: Run) -> str | None:
    """What to say where heads were not trained on the same data for as many steps; None where they were."""
    heads = run.record.get("heads") or {}
    ways = {(head.get("data"), head.get("steps")) for head in heads.values()}
    if len(ways) < 2:
        return None
    told = [f"{name}: {head.get('steps', 'unknown')} steps, {head.get('data', NONE)}" for name, head in heads.items()]
    return f"the heads were not all trained alike: {'; '.join(told)}."


def asked_text(method: Mapping[str, Any]) -> str:
    """What a method was not asked that others were."""
    parts = [f"{how_many(method['limit'], 'question')} of every task"] if method.get("limit") else []
    parts += [f"temperature {t:g}" for t in method.get("temperatures") or ()]
    parts += [f"task {task}" for task in method.get("tasks") or ()]
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
        shape += [f"heat {tree['draft_temperature']:g}"] if "heat" in takes and tree.get("heat", 1) != 1 else []
        if "shortlist" in takes:
            shape += [f"shortlist {tree['shortlist'] or 'all'}", f"likely {tree.get('shortlist_parents', 0)}"]
        budgets.setdefault(", ".join(shape), []).append(str(tree["budget"]))
    return "; ".join(f"{', '.join(some)}: {shape}" for shape, some in budgets.items())


def lossless_table(run: Run) -> Table | None:
    """Per method and setting, over all tasks, in a row where all the same is to be said; None where nothing was
    compared."""
    compared = in_order(cell for cell in run.cells if cell.lossless and not cell.is_plain)
    if not compared:
        return None
    rows: dict[tuple[str, ...], list[Result]] = {}
    for (temperature, batch, _), group in groupby(compared, key=lambda c: (c.temperature, c.batch, c.label)):
        cells = list(group)
        checks = [cell.lossless for cell in cells if cell.lossless]
        gaps = [check.widest_gap for check in checks if check.widest_gap is not None]
        counts = [sum(getattr(check, name) for check in checks) for name in COUNTS]
        widest = f"{max(gaps):.4g}" if gaps else NONE
        row = (f"{temperature:g}", str(batch), checks[0].check, *map(str, counts), widest)
        rows.setdefault(row, []).append(cells[0])
    columns = ("method, budget", "temperature", "batch", "check", *COUNTS, "widest gap")
    caption = (
        "Beside plain decoding; a greedy answer counts once, however often it was repeated. Gap: how far apart the "
        "target holds the two tokens where a text first differs, reading it at once. Where that is wider than a tie, "
        "the least of several readings decides, each rounded a little more by chance; it is a tie as well if these are "
        "as far from each other as it is wide."
    )
    if run.widest_tie is not None:
        limit = f"{run.widest_tie:.3g}"
        caption += (
            f" Ties: at most {limit} apart, which rounding as measured in this run may decide. Mistakes: the rest."
        )
    everyone = [cell for cells in rows.values() for cell in cells]  # one of each, whatever tasks it has
    lines = tuple((names_of(cells, everyone), *row) for row, cells in rows.items())
    return Table(columns, lines, caption, first_number=4, wraps=True)


def differences_table(run: Run) -> Table | None:
    """Texts that differ from the plain one: mistakes first, then the widest gaps, as many as one may want to read."""
    found = [(cell, d) for cell in run.cells if cell.lossless for d in cell.lossless.different]
    found.sort(key=lambda one: (one[1]["tie"], -(one[1]["gap"] or 0.0)))
    rows = [
        (
            *(str(d["id"]), cell.label, f"{cell.temperature:g}", str(cell.batch), numbered(d["repeats"])),
            *(numbered([d["turn"]]), numbered([d["position"]]), text_of(d["gap"], 4), text_of(d["least"], 4)),
            text_of(d.get("moved"), 4),
            d["why"] or ("tie" if d["tie"] else "mistake"),
        )
        for cell, d in found[:MOST_DIFFERENCES]
    ]
    columns = (
        "question",
        "method",
        "temperature",
        "batch",
        "repeats",
        "turn",
        "token",
        "gap",
        "least gap",
        "moved",
        "verdict",
    )
    is_cut = len(rows) < len(found)
    told = f"The first {len(rows)} of {len(found)}: mistakes, then the widest. All are in {RESULTS_FILE}."
    return without_empty(Table(columns, tuple(rows), told if is_cut else "", first_number=2)) if rows else None


def numbered(indices: Iterable[int]) -> str:
    """As people count: from 1."""
    return ", ".join(str(index + 1) for index in indices)


def errors_table(run: Run) -> Table | None:
    """Every failure once, with the repeats in which it came."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for cell in run.cells:
        for error in cell.errors:
            place = (cell.task, error["id"], cell.label, f"{cell.temperature:g}", str(cell.batch), error["error"])
            rows.setdefault(place, []).append(error["repeat"])
    if not rows:
        return None
    columns = ("task", "question", "method", "temperature", "batch", "repeats", "failure")
    lines = tuple((*place, numbered(repeats), failure) for (*place, failure), repeats in rows.items())
    return Table(columns, lines, first_number=len(columns), wraps=True)
