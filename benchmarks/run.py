"""`run` and `grade`: a benchmark from start to end, its table on stdout and remarks on stderr."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.estimate import how_many
from benchmarks.grade import MATH_TASKS, NEEDS_MATH_VERIFY
from benchmarks.measure import Bench, check_inputs, questions_of
from benchmarks.options import Output, examples, numbers
from benchmarks.recipe import KINDS, OLD_KEYS, PLAIN, BenchConfig, DtypeName, with_new_keys
from benchmarks.report import print_summary, report_folder, write_report
from benchmarks.results import PARTIAL_NOTE, RESULTS_FILE, RUN_FILE, Result, Run, commits_of
from benchmarks.rows import kept_settings
from benchmarks.run_record import Results, grade_run
from benchmarks.tables import Form, numbered
from benchmarks.tasks import BUILTIN, GRADED_AS, TASKS
from jetspec.commands.screen import err, working
from jetspec.config import DrafterName
from jetspec.data.rows import earlier_runs
from jetspec.engine.llm import LLM
from jetspec.models.hub import shipped_head
from jetspec.record import write_record
from jetspec.settings import from_dict, read_settings

QUICK: dict[str, Any] = {"tasks": [BUILTIN], "limit": 6, "max_tokens": 48, "budgets": [16], "repeats": 3}
"""A few minutes on a CPU. Answers to the first built-in questions fit, so that scores are meaningful."""
SHOWN = 8
"""Differing texts and reasons of failures that are printed."""
LISTS: dict[str, Any] = {"budgets": int, "batches": int, "temperatures": float}
WHAT, HOW = "What", "How"

RunFolder = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default runs/bench/NAME.")]
MakeReport = Annotated[bool, typer.Option("--report", help="Make the report of the run as well.")]
EPILOG = examples(
    "run --quick --report",
    "run --tasks gsm8k,mbpp --data-dir data/eval --methods ngram,jetspec-edge=heads/mine --budgets 16,64",
    "run benchmarks/recipes/table01.yaml --data-dir data/eval --limit 10 --output csv > table01.csv",
    "run --methods transformers --url http://localhost:8000/v1 --batch 1,8",
)
GRADE_EPILOG = examples("grade runs/bench/smollm2", "grade runs/from_the_cluster --data-dir data/eval --report")


def setting(help: str, *names: str, panel: str = HOW) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def run(
    recipe: Annotated[Path | None, typer.Argument(help="YAML file of settings.")] = None,
    model: Annotated[str | None, setting("Target: a name, folder or GGUF file.", "--model", "-m", panel=WHAT)] = None,
    head: Annotated[str | None, setting("Head of methods that name none.", panel=WHAT)] = None,
    methods: Annotated[str | None, setting(f"{', '.join(KINDS)}; NAME=HEAD, MODEL or URL.", panel=WHAT)] = None,
    tasks: Annotated[str | None, setting(f"{', '.join(TASKS)}, or files of --data-dir.", panel=WHAT)] = None,
    data_dir: Annotated[str | None, setting("Folder of TASK.jsonl; else from Hugging Face.", panel=WHAT)] = None,
    url: Annotated[str | None, setting("Measure an OpenAI-compatible server, too.", panel=WHAT)] = None,
    budgets: Annotated[str | None, setting("Most nodes of a tree.")] = None,
    batches: Annotated[str | None, setting("Questions decoded together.", "--batch")] = None,
    temperatures: Annotated[str | None, setting("0 is greedy.", "--temperature", "-t")] = None,
    repeats: Annotated[int | None, setting("Repeats of every measurement.", "--repeats", "-r")] = None,
    limit: Annotated[int | None, setting("Questions per task.")] = None,
    skip: Annotated[int | None, setting("Questions per task to pass over first.")] = None,
    max_tokens: Annotated[int | None, setting("Most tokens of an answer.", "--max-tokens", "-n")] = None,
    seed: Annotated[int | None, setting("Seed of draws at a temperature above 0.")] = None,
    dtype: Annotated[DtypeName | None, setting("float32, bfloat16, float16.")] = None,
    device: Annotated[str | None, setting("cpu or cuda.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few built-in questions: minutes, also on a CPU.")] = False,
    out: RunFolder = None,
    output: Output = "md",
    report: MakeReport = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run holds and start over.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Repeat groups with failed questions.")] = False,
) -> None:
    """Measure methods against plain decoding, as a recipe says or by options alone.

    Speed as mean ± sd over repeats, tokens per round, score, and whether the text is that of plain decoding. Lists are
    separated by commas.

    Stop it at any time: the same command resumes. Exit status 1: our methods wrote other texts than plain decoding, and
    not by rounding, or failed where it did not, or nothing could be compared.
    """
    given = {name: value for name, value in locals().items() if name in SETTINGS and value is not None}
    given |= {name: value.split(",") for name, value in given.items() if name in ("methods", "tasks")}
    given |= {name: numbers(value, LISTS[name], -math.inf, name) for name, value in given.items() if name in LISTS}
    plan = read_plan(recipe, {**(QUICK if quick else {}), **given})
    folder = out or Path("runs/bench") / ("quick" if quick else recipe.stem if recipe else "bench")
    if not run_plan(plan, folder, output, fresh, retry_failed, report):
        raise typer.Exit(1)


SETTINGS = {field.name for field in fields(BenchConfig)}


def grade(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished `run`.", metavar="RUN")],
    data_dir: Annotated[str | None, typer.Option(help="Folder of TASK.jsonl; by default that of the run.")] = None,
    output: Output = "md",
    report: MakeReport = False,
) -> None:
    """Grade the answers of a run again.

    `run` grades by itself. This is for answers from a machine without graders, or for other graders: scores are made
    anew, and nothing else of the run changes. Exit status 1: some answers could not be graded here, either.
    """
    record = grade_run(folder, data_dir, progress=True)
    write_record(folder / RESULTS_FILE, record)
    finish(show_run(folder, output), folder, report)
    if record["ungraded"]:
        raise typer.Exit(1)


def read_plan(recipe: Path | None, changes: Mapping[str, Any]) -> BenchConfig:
    """Plan of a recipe file, or of none, with `changes` in place of its settings."""
    written = read_settings(recipe) if recipe is not None else {}
    if (renamed := with_new_keys(written)) != written:
        old = next(old for old in OLD_KEYS if f"'{old}':" in str(written))
        say(f"{recipe}: {old} is called {OLD_KEYS[old]} now; the old name works for one more release")
    if "measure" in renamed:
        raise ValueError(f"{recipe}: `measure` is gone; benchmarks/recipes/table12.sh measures the cost of drafting")
    return from_dict(BenchConfig, {**renamed, **changes})


def run_plan(
    plan: BenchConfig, folder: Path, form: Form, fresh: bool = False, retry_failed: bool = False, report: bool = False
) -> bool:
    """Measure into a folder, print the table. False: our text was not shown to be the target's, but for ties."""
    before = [] if fresh else earlier_runs(folder / RUN_FILE, {})[0]
    try:
        measure(plan, folder, fresh, retry_failed)
    except KeyboardInterrupt:
        say(f"stopped: the same command{', without --fresh,' if fresh else ''} resumes {folder}")
        raise
    inputs = show_run(folder, form)
    if before and kept_settings(folder / RUN_FILE)["runs"] == before:
        record = inputs[0].record
        done = datetime.fromisoformat(record["date"])
        when = f"{done:%Y-%m-%d %H:%M:%S} UTC at commit {commits_of(record)}"
        say(f"nothing was left to measure: all of it was measured by {when}, and --fresh measures again")
    finish(inputs, folder, report)
    return is_lossless(plan, inputs[0])


def measure(plan: BenchConfig, folder: Path, fresh: bool, retry_failed: bool) -> None:
    """Measure what the folder lacks, and write its record."""
    check_inputs(plan, folder, fresh)
    for warning in ungraded(plan):
        say(f"{warning}; `grade` can grade the answers later, here or elsewhere")
    # Without a head the shipped one, if any, not the registry's choice: that depends on the machine's cache.
    head = plan.head or shipped_head(plan.model)
    drafter: DrafterName = "head" if head else "ngram"
    with working(f"Loading {plan.model}"):
        llm = LLM(plan.model, head, drafter=drafter, device=plan.device, dtype=plan.dtype)
    bench = Bench(plan, llm, folder)
    rows = bench.run(progress=True, fresh=fresh, retry_failed=retry_failed)
    write_record(folder / RESULTS_FILE, Results(bench, rows).record(progress=True))


def show_run(folder: Path, form: Form) -> list[Run]:
    inputs = print_summary([folder], form)
    for line in (line for found in inputs if found.cells for line in remarks(found)):
        say(line)
    return inputs


def finish(inputs: list[Run], folder: Path, report: bool) -> None:
    """Write the report of a run, or print the command for it."""
    if report:
        write_report(inputs, report_folder(folder))
    else:
        command = f"python -m benchmarks report {shlex.quote(str(folder))}"
        say(f"for a page with plots, and the paper's results where it has them: {command}")


def ungraded(config: BenchConfig) -> Iterator[str]:
    """Warnings about tasks that will have no scores, before anything is measured."""

    def is_mathematical(task: str) -> bool:
        """A question is, as far as they are on this machine."""
        rows = [prompt.row for prompt in questions_of(config, task)] if config.data_dir or task == BUILTIN else [{}]
        return any(row.get(GRADED_AS, task) in MATH_TASKS for row in rows)

    mathematics = [task for task in config.tasks if is_mathematical(task)]
    if mathematics and find_spec("math_verify") is None:
        yield f"no scores of {', '.join(mathematics)}: {NEEDS_MATH_VERIFY}"


def is_lossless(config: BenchConfig, run: Run) -> bool:
    """Our methods wrote the target's text, but for ties. Texts that could not be compared do not count as the same."""
    outside = {method.name for method in config.all_methods() if not method.is_ours}
    ours = [cell for cell in run.cells if cell.lossless and cell.method not in outside]
    plain_failed = {cell.key: cell.failed for cell in run.cells if cell.is_plain}
    return all(
        check.compared and not check.mistakes and cell.failed <= plain_failed[cell.key.beside(PLAIN, 1)]
        for cell in ours
        if (check := cell.lossless)
    )


def remarks(run: Run) -> Iterator[str]:
    """Remarks on a run that its table does not hold; last the number of texts that differ at ties, then the first that
    differ elsewhere."""

    def place(cell: Result) -> str:
        return f"{cell.label} at temperature {cell.temperature:g}, batch {cell.batch},"

    yield from run.notes
    if run.few_repeats:
        yield run.few_repeats
    if any(cell.speedup and cell.speedup.differs_from_1() is False for cell in run.cells):
        yield "≈: not shown to be faster or slower by more than the spread over repeats and over questions"
    failures = Counter(error["error"] for cell in run.cells for error in cell.errors)
    if failures:
        often = "; ".join(f"{reason} ({count})" for reason, count in failures.most_common(SHOWN))
        yield f"{how_many(failures.total(), 'answer')} failed, and --retry-failed repeats them: {often}"
    if cut := max((cell.score.cut for cell in run.cells if cell.score), default=0):
        yield f"up to {cut} graded answers of a cell were cut at {run.recipe['max_tokens']} tokens, scores may be low"
    if any(cell.score and cell.score.partial for cell in run.cells):
        yield PARTIAL_NOTE
    checked = [(cell, cell.lossless) for cell in run.cells if cell.lossless]
    if ties := sum(check.ties for _, check in checked):
        limit = "" if run.widest_tie is None else f", of two tokens at most {run.widest_tie:.2g} apart"
        yield f"{how_many(ties, 'text')} left that of {PLAIN} at a tie{limit}; the report lists them"
    for cell, check in checked:
        if not check.compared:
            yield f"{place(cell)} has no answer on {cell.task} that could be compared with that of {PLAIN}"
    found = [(cell, each) for cell, check in checked for each in check.different if not each["tie"]]
    for cell, each in found[:SHOWN]:
        where = f"{each['id']}, turn {each['turn'] + 1}, from token {each['position'] + 1} on"
        gap = "one text ends earlier" if each["gap"] is None else f"{each['gap']:.2g} apart in the target's logits"
        how = each["why"] or f"{gap}, no tie"
        yield f"{place(cell)} differs from {PLAIN} in {where} (repeats: {numbered(each['repeats'])}): {how}"
    if len(found) > SHOWN:
        yield f"{len(found) - SHOWN} more texts differ from {PLAIN}; the report lists them"


def say(line: str) -> None:
    err().print(line, style="dim", markup=False)
