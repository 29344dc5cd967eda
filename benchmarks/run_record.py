"""From rows to the record of a run: speeds, tokens per round, scores, and comparisons with plain decoding.

Scores are those of a run that is being recorded, or of a finished one, graded again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.cells import Answer, Measured, accepted_lengths, round_questions, speedup, tokens_per_round
from benchmarks.estimate import how_many, to_record
from benchmarks.grade import MATH_TASKS, Grade, grade
from benchmarks.lossless import LosslessCheck
from benchmarks.measure import Bench, questions_of
from benchmarks.recipe import PLAIN, TRANSFORMERS, BenchConfig, Cell
from benchmarks.results import RESULTS_FILE, ROWS_FILE, RUN_FILE, from_record, read_record
from benchmarks.rows import Key, Row, kept_settings, measured_by, questions_digest, read_rows
from benchmarks.tasks import GRADED_AS, TASKS
from jetspec.data.prompts import Prompt
from jetspec.progress import progress_bar
from jetspec.record import GRADERS, make_record

Grader = Callable[[str, Mapping[str, Any], str], Grade]
Counts = Mapping[str, Any] | None
"""The score of a cell in a record."""


def is_graded(task: str) -> bool:
    return task in TASKS and TASKS[task].grader is not None


class Scores:
    """Grades answers of the first repeat of cells, equal answers to a question once."""

    def __init__(
        self,
        cells: Iterable[Measured],
        questions: Mapping[str, Sequence[Prompt]],
        grader: Grader = grade,
        progress: bool = False,
    ) -> None:
        rows = {(task, prompt.id): prompt.row for task, prompts in questions.items() for prompt in prompts}

        def graded(key: tuple[str, str, str]) -> Grade | str:
            task, id, text = key
            try:
                return grader(rows[task, id].get(GRADED_AS, task), rows[task, id], text)
            except ValueError as error:
                return str(error)

        keys = dict.fromkeys(key for mine in cells for key in keys_of(mine))
        mathematics = {key: None for key in keys if rows[key[:2]].get(GRADED_AS, key[0]) in MATH_TASKS}
        programs = [key for key in keys if key not in mathematics]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            # Mathematics stays in the main thread, which its timeout needs.
            grades = chain(pool.map(graded, programs), map(graded, mathematics))
            options: Any = {"desc": "grading", "unit": "answer", "disable": not (progress and keys)}
            bar = progress_bar(grades, total=len(keys), **options)
            self.grades = dict(zip((*programs, *mathematics), bar, strict=True))
            """Grade by task, question and text, or the reason why there is none."""
        self.ungraded: dict[str, str] = {}
        """Tasks whose answers could not be graded here, with the reason."""

    def of(self, mine: Measured) -> Counts:
        """Counts of right answers of a cell. None: nothing was graded."""
        graded = []
        for key, answer in keys_of(mine).items():
            if isinstance(found := self.grades[key], str):
                self.ungraded[mine.cell.task] = found
                return None
            if found.correct is not None:
                graded.append((found, answer))
        if not graded:
            return None
        right = [answer["id"] for grade, answer in graded if grade.correct]
        return {
            "correct": len(right),
            "graded": len(graded),
            "share": len(right) / len(graded),
            "partial": sum(grade.is_partial for grade, _ in graded),
            "cut": sum(answer["finish"][-1] == "length" for _, answer in graded),
            "right": right,
            "wrong": [answer["id"] for grade, answer in graded if not grade.correct],
        }

    @property
    def notes(self) -> list[str]:
        return [f"{task} is not graded: {why}" for task, why in self.ungraded.items()]


def keys_of(mine: Measured) -> dict[tuple[str, str, str], Answer]:
    """Answers of a cell that have a grader, by task, question and text."""
    task = mine.cell.task
    answers = mine.whole_answers[0] if is_graded(task) else ()
    return {(task, answer["id"], answer["text"][-1]): answer for answer in answers}


def by_cell(rows: Mapping[Key, Row], repeats: int) -> dict[Cell, Measured]:
    """Cells of the first repeats of rows, their groups in order."""
    found: dict[Cell, list[list[Row]]] = {}
    for (cell, repeat, _), row in sorted(rows.items(), key=lambda item: item[0][1:]):
        if repeat < repeats:
            found.setdefault(cell, [[] for _ in range(repeats)])[repeat].append(row)
    return {cell: Measured(cell, rows) for cell, rows in found.items()}


@dataclass
class Results:
    """Turns the rows of a benchmark into its record."""

    bench: Bench
    rows: Mapping[Key, Row]
    grader: Grader = grade

    def record(self, progress: bool = False) -> dict[str, Any]:
        decoder, config = self.bench.llm.target.decoder, self.bench.config
        scores = Scores(self.measured.values(), self.bench.questions, self.grader, progress)
        bar, cells = progress_bar(self.measured.values(), unit="cell", disable=not progress), []
        for mine in bar:
            bar.set_description(f"comparing: {mine.cell.method} {mine.cell.task}", refresh=sys.stderr.isatty())
            cells.append(self.cell(mine, scores))
        return {
            **measured_by(self.rows.values(), self.bench.runs()),
            "model": self.bench.llm.model_name,
            "dtype": str(decoder.embedding.dtype).removeprefix("torch."),
            "device": decoder.embedding.device.type,
            **self.bench.weights(),
            "recipe": config.to_dict(self.bench.methods),
            "noise": self.lossless.noise_record(),
            "cells": cells,
            "notes": list(self._notes()),
            "ungraded": scores.notes,
            "runs": self.bench.runs(),
        }

    def _notes(self) -> Iterator[str]:
        """Notes on batches that were never full, and on rows of several commands or sources."""
        yield from self._short_batches()
        apart = {  # only within a command methods take turns
            cell.method: None
            for cell, measured in self.measured.items()
            if measured.beside(plain := self.plain_of(cell)).commands != plain.beside(measured).commands
        }
        if apart:
            names = ", ".join(apart)
            yield f"measured, in part, by another command than the plain decoding that they are compared with: {names}"
        if unused := len(read_rows(self.bench.folder / ROWS_FILE)) - len(self.rows):
            yield f"the folder holds {how_many(unused, 'more group')} that this command did not ask for"
        for name, settings in self.bench.left_open().items():
            if settings:
                yield f"{name} was asked without {', '.join(settings)}: what its server takes instead is not known"
        if len(commits := self.bench.commits()) > 1:
            yield f"measured by several versions of the source, one after the other: {', '.join(commits)}"

    def _short_batches(self) -> Iterator[str]:
        """Notes on methods that were asked fewer questions than a batch holds."""
        methods: dict[tuple[str, int], set[str]] = {}
        short: dict[tuple[str, int, int], set[str]] = {}
        for cell, measured in self.measured.items():
            methods.setdefault((cell.task, cell.batch), set()).add(cell.method)
            if measured.fullest < cell.batch:
                short.setdefault((cell.task, cell.batch, measured.fullest), set()).add(cell.method)
        for (task, batch, count), names in short.items():
            is_all = names == methods[task, batch]
            subject = "there are" if is_all else f"{' and '.join(sorted(names))} got"
            yield f"{task} in batches of {batch}: {subject} only {how_many(count, 'question')}"

    def plain_of(self, cell: Cell) -> Measured:
        return self.measured[cell.beside(PLAIN, 1)]

    @cached_property
    def measured(self) -> dict[Cell, Measured]:
        found = by_cell(self.rows, self.bench.config.repeats)
        return {cell: found[cell] for method in self.bench.methods for cell in self.bench.config.cells(method)}

    def cell(self, mine: Measured, scores: Scores) -> dict[str, Any]:
        plain, rounds = self.plain_of(mine.cell), round_questions(mine)
        return {
            **asdict(mine.cell),
            "questions": len(mine.answers[0]),
            "together": mine.fullest,
            "tokens": mine.tokens,
            "tokens_per_s": to_record(mine.speeds),
            "tokens_per_round": to_record(tokens_per_round(mine))
            | {"questions": list(rounds.values()), "ids": list(rounds)},
            "accepted": accepted_lengths(mine),
            "prefill_s": to_record(mine.prefills),
            "speedup": speedup(mine, plain),
            "speedup_transformers": speedup(mine, self.measured.get(mine.cell.beside(TRANSFORMERS, None))),
            "score": scores.of(mine),
            "lossless": self.lossless.of(mine, plain) if mine is not plain else None,
            "errors": [
                {"id": answer["id"], "repeat": repeat, "error": answer["error"]}
                for repeat, answers in enumerate(mine.answers)
                for answer in answers.values()
                if answer["error"]
            ],
        }

    @cached_property
    def lossless(self) -> LosslessCheck:
        return LosslessCheck(self.bench, [measured for cell, measured in self.measured.items() if cell.method == PLAIN])


def grade_run(folder: Path, data_dir: str | None, progress: bool = False) -> dict[str, Any]:
    """Record of a finished run with new scores; all else is kept. Neither its target nor its machine is needed."""
    for name in (RESULTS_FILE, ROWS_FILE, RUN_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no folder of a finished `benchmarks run`: it has no {name}")
    record = read_record(folder / RESULTS_FILE)
    if not {"cells", "recipe"} <= set(record):
        raise ValueError(f"{folder} holds no answers to grade")
    questions = read_questions(folder, record["recipe"], data_dir)
    firsts = by_cell(read_rows(folder / ROWS_FILE), 1)
    found = [from_record(Cell, raw) for raw in record["cells"]]
    if lacking := next((cell for cell in found if cell not in firsts), None):
        raise ValueError(f"{folder / ROWS_FILE} has no answers of {lacking.method} on {lacking.task}")
    scores = Scores([firsts[cell] for cell in found], questions, progress=progress)
    cells = [{**raw, "score": scores.of(firsts[cell])} for raw, cell in zip(record["cells"], found, strict=True)]
    for before, now in zip(record["cells"], cells, strict=True):
        check_kept(now["task"], before["score"], now["score"], scores.ungraded)
    made = make_record({})
    versions = {name: version for name, version in made["versions"].items() if name in ("python", *GRADERS)}
    graded = {key: made[key] for key in ("command", "date", "commit")} | {"versions": versions}
    return {**record, "cells": cells, "ungraded": scores.notes, "graded": graded}


def check_kept(task: str, before: Counts, now: Counts, why: Mapping[str, str]) -> None:
    """Refuse scores of fewer answers or tests than before."""

    def answered(score: Mapping[str, Any]) -> set[str]:
        return {*score["right"], *score["wrong"]}

    if before is not None and (now is None or answered(before) - answered(now) or now["partial"] > before["partial"]):
        reason = why.get(task, "these questions have fewer references")
        raise ValueError(f"{task} would lose scores that the run has: {reason}")


def read_questions(folder: Path, recipe: Mapping[str, Any], data_dir: str | None) -> dict[str, list[Prompt]]:
    """Questions of a run that have graders, from its recipe's folder or another."""
    tasks = tuple(recipe["tasks"])
    config = BenchConfig(
        tasks=tasks, data_dir=data_dir or recipe["data_dir"], limit=recipe["limit"], skip=recipe["skip"]
    )
    if config.data_dir is not None and not Path(config.data_dir).is_dir():
        raise ValueError(f"{config.data_dir} is not a folder of questions; name the one with --data-dir")
    settings = kept_settings(folder / RUN_FILE)["settings"]
    questions = {task: questions_of(config, task) for task in tasks if is_graded(task)}
    if not questions:
        raise ValueError(f"no task of {folder} has a grader: {', '.join(tasks)}")
    for task, prompts in questions.items():
        if questions_digest(prompts) != settings.get(f"task {task}"):
            raise ValueError(f"the questions of {task} are not those that {folder} has answers to")
    return questions
