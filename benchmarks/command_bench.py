"""`jetspec bench`: a benchmark from start to end, its table on stdout and what the table has no room for on stderr."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.check_tables import numbered
from benchmarks.command_report import report_folder, show, write_report
from benchmarks.costs import CostConfig, cost_results, measure_costs
from benchmarks.grade import MATH_TASKS, NEEDS_MATH_VERIFY
from benchmarks.groups import kept_settings
from benchmarks.measure import Bench, check_inputs, questions_of
from benchmarks.recipe import PLAIN, BenchConfig
from benchmarks.results import Results
from benchmarks.runs import PARTIAL_NOTE, RESULTS_FILE, RUN_FILE, Inputs, Lossless, Result, Run, commits_of
from benchmarks.scores import grade_run
from benchmarks.spread import how_many
from benchmarks.summary import SummaryForm
from benchmarks.tasks import BUILTIN, GRADED_AS
from jetspec.commands.screen import err, working
from jetspec.data.rows import earlier_runs
from jetspec.engine.llm import LLM
from jetspec.record import write_record
from jetspec.settings import from_dict, read_settings

Plan = BenchConfig | CostConfig

QUICK: dict[str, Any] = {"tasks": [BUILTIN], "limit": 6, "max_tokens": 48, "budgets": [16], "repeats": 3}
"""A few minutes on a CPU. The first built-in questions have answers that fit, so that scores say something."""
SHOWN = 8
"""Texts that differ, and reasons of failures, that are named on the terminal."""


def read_plan(recipe: Path | None, changes: Mapping[str, Any]) -> Plan:
    """A recipe file, or none, with settings that take the place of its own."""
    raw = {**(read_settings(recipe) if recipe is not None else {}), **changes}
    plans = {"methods": BenchConfig, "costs": CostConfig}
    if (measure := raw.pop("measure", "methods")) not in plans:
        raise ValueError(f"measure is {measure!r}; choose one of {', '.join(plans)}")
    settings = {name: {setting.name for setting in fields(config)} for name, config in plans.items()}
    elsewhere = set().union(*settings.values()) - settings[measure]
    if idle := [name for name in changes if name in elsewhere]:
        raise ValueError(f"what measures {measure} has no {', '.join(idle)}")
    plan: Plan = from_dict(plans[measure], raw, "")
    return plan


def run_plan(
    plan: Plan,
    folder: Path,
    form: SummaryForm,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    report: bool = False,
) -> bool:
    """Measure into a folder, print the table. False: our text was not shown to be the target's, but for ties."""
    before = [] if fresh else earlier_runs(folder / RUN_FILE, {})[0]
    try:
        measure(plan, folder, fresh, retry_failed)
    except KeyboardInterrupt:
        _say(f"stopped: the same command{', without --fresh,' if fresh else ''} goes on with what {folder} lacks")
        raise
    inputs = show_run(folder, form)
    if before and kept_settings(folder / RUN_FILE)["runs"] == before:
        (record,) = [run.record for run in inputs.runs] or [costs.record for costs in inputs.costs]
        _say(nothing_new(record))
    close_with_report(inputs, folder, report)
    return isinstance(plan, CostConfig) or is_lossless(plan, inputs.runs[0])


def grade(folder: Path, data_dir: str | None, form: SummaryForm, report: bool) -> bool:
    """Grade the answers of a finished run, print its table. False: those of a task could not be graded."""
    record = grade_run(folder, data_dir, progress=True)
    write_record(folder / RESULTS_FILE, record)
    close_with_report(show_run(folder, form), folder, report)
    return not record["ungraded"]


def show_run(folder: Path, form: SummaryForm) -> Inputs:
    """Print the table of a run, and what it has no room for."""
    inputs = show([folder], form)
    for line in (line for run in inputs.runs for line in remarks(run)):
        _say(line)
    return inputs


def close_with_report(inputs: Inputs, folder: Path, report: bool) -> None:
    """The page of a run, or how to have it."""
    if report:
        write_report(inputs, report_folder(folder))
    else:
        command = f"jetspec report {shlex.quote(str(folder))}"
        _say(f"for a page with plots, and the paper's results where it has them: {command}")


def measure(plan: Plan, folder: Path, fresh: bool, retry_failed: bool) -> None:
    """Measure what the folder does not hold yet, and write its record."""
    if isinstance(plan, BenchConfig):
        measure_methods(plan, folder, fresh, retry_failed)
        return
    if retry_failed:
        raise ValueError("--retry-failed is for questions; here what fails stops the run, and is not in its folder")
    costs = measure_costs(plan, folder, fresh, progress=True)
    runs = kept_settings(folder / RUN_FILE)["runs"]
    write_record(folder / RESULTS_FILE, cost_results(plan, costs, runs))


def nothing_new(record: Mapping[str, Any]) -> str:
    """What to say of a run that was finished before."""
    done = datetime.fromisoformat(record["date"])
    return (
        f"nothing was left to measure: all of it was measured by {done:%Y-%m-%d %H:%M:%S} UTC at commit"
        f" {commits_of(record)}, and --fresh measures again"
    )


def measure_methods(config: BenchConfig, folder: Path, fresh: bool, retry_failed: bool) -> None:
    check_inputs(config, folder, fresh)
    for warning in ungraded(config):
        _say(f"{warning}; `jetspec grade` can grade the answers later, here or elsewhere")
    with working(f"Loading {config.model}"):
        llm = LLM(config.model, config.head, device=config.device, dtype=config.dtype)
    bench = Bench(config, llm, folder)
    rows = bench.run(progress=True, fresh=fresh, retry_failed=retry_failed)
    write_record(folder / RESULTS_FILE, Results(bench, rows).record(progress=True))


def ungraded(config: BenchConfig) -> Iterator[str]:
    """What will have no scores: better known before an hour of measuring than behind it."""
    mathematics = [task for task in config.tasks if has_mathematics(config, task)]
    if mathematics and find_spec("math_verify") is None:
        yield f"no scores of {', '.join(mathematics)}: {NEEDS_MATH_VERIFY}"


def has_mathematics(config: BenchConfig, task: str) -> bool:
    """By its questions, where they lie here."""
    rows = [prompt.row for prompt in questions_of(config, task)] if config.data_dir or task == BUILTIN else [{}]
    return any(row.get(GRADED_AS, task) in MATH_TASKS for row in rows)


def is_lossless(config: BenchConfig, run: Run) -> bool:
    """Whether our methods wrote the target's text, but for ties. What could not be compared was not shown to: plain
    decoding failed everywhere, or a method where plain decoding did not."""
    outside = {method.name for method in config.contenders() if not method.is_ours}
    ours = [cell for cell in run.cells if cell.lossless and cell.method not in outside]
    return all(_is_shown(run, cell, cell.lossless) for cell in ours if cell.lossless)


def _is_shown(run: Run, cell: Result, check: Lossless) -> bool:
    plain = run.cell(cell.key.beside(PLAIN, 1))
    assert plain is not None
    return bool(check.compared) and not check.mistakes and cell.failed <= plain.failed


def remarks(run: Run) -> Iterator[str]:
    """What a table has no room for."""
    yield from run.notes
    if run.few_repeats:
        yield run.few_repeats
    if any(cell.speedup and cell.speedup.differs_from_1() is False for cell in run.cells):
        yield "≈: not shown to be faster or slower by more than the spread over repeats and over questions"
    failures = Counter(error["error"] for cell in run.cells for error in cell.errors)
    if failures:
        often = "; ".join(f"{reason} ({count})" for reason, count in failures.most_common(SHOWN))
        yield f"{how_many(failures.total(), 'answer')} failed, and --retry-failed asks again: {often}"
    if cut := max((cell.score.cut for cell in run.cells if cell.score), default=0):
        yield f"up to {cut} graded answers of a cell were cut at {run.recipe['max_tokens']} tokens, scores may be low"
    if any(cell.score and cell.score.partial for cell in run.cells):
        yield PARTIAL_NOTE
    yield from lossless_remarks(run)


def lossless_remarks(run: Run) -> Iterator[str]:
    """How many texts part at ties, then the first that part elsewhere."""
    checked = [(cell, cell.lossless) for cell in run.cells if cell.lossless]
    if ties := sum(check.ties for _, check in checked):
        limit = "" if run.widest_tie is None else f", of two tokens at most {run.widest_tie:.2g} apart"
        yield f"{how_many(ties, 'text')} left that of {PLAIN} at a tie{limit}; the report lists them"
    for cell, check in checked:
        if not check.compared:
            yield f"{_who(cell)} has no answer on {cell.task} that could be compared with that of {PLAIN}"
    found = [(cell, each) for cell, check in checked for each in check.different if not each["tie"]]
    for cell, each in found[:SHOWN]:
        place = f"{each['id']}, turn {each['turn'] + 1}, from token {each['position'] + 1} on"
        gap = "one text ends earlier" if each["gap"] is None else f"{each['gap']:.2g} apart in the target's logits"
        how = each["why"] or f"{gap}, no tie"
        yield f"{_who(cell)} differs from {PLAIN} in {place} (repeats: {numbered(each['repeats'])}): {how}"
    if len(found) > SHOWN:
        yield f"{len(found) - SHOWN} more texts differ from {PLAIN}; the report lists them"


def _who(cell: Result) -> str:
    return f"{cell.label} at temperature {cell.temperature:g}, batch {cell.batch},"


def _say(line: str) -> None:
    err().print(line, style="dim", markup=False)
