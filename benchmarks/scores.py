"""Scores of answers: of a run that is being recorded, or of a finished one, graded again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cells import Measured
from benchmarks.grade import MATH_TASKS, Grade, grade
from benchmarks.measure import questions_of
from benchmarks.recipe import BenchConfig, Cell
from benchmarks.results import RESULTS_FILE, ROWS_FILE, RUN_FILE, read_record
from benchmarks.rows import Row, kept_settings, questions_digest, read_lines
from benchmarks.tasks import GRADED_AS, TASKS
from jetspec.data.prompts import Prompt
from jetspec.progress import progress_bar
from jetspec.record import GRADERS, make_record

Grader = Callable[[str, Mapping[str, Any], str], Grade]
Key = tuple[str, str, str]
"""Task, question, and the text of its answer."""
Counts = Mapping[str, Any] | None
"""The score of a cell in a record."""


def is_graded(task: str) -> bool:
    return task in TASKS and TASKS[task].grader is not None


class Scores:
    """Grades answers by task; equal answers to a question once. Only the first repeat of a cell counts."""

    def __init__(self, questions: Mapping[str, Sequence[Prompt]], grader: Grader = grade) -> None:
        self.rows = {task: {prompt.id: prompt.row for prompt in prompts} for task, prompts in questions.items()}
        self.grader = grader
        self.grades: dict[Key, Grade] = {}
        self.ungraded: dict[str, str] = {}
        """Tasks whose answers could not be graded here, with the reason."""

    def run_programs(self, cells: Collection[Measured], progress: bool = False) -> None:
        """Grade programs, several at a time. Mathematics is left to `of`: its timeout needs the main thread."""
        answers = {
            (mine.cell.task, answer["id"], answer["text"][-1]): None
            for mine in cells
            if is_graded(mine.cell.task)
            for answer in mine.whole_answers(0)
            if self.rows[mine.cell.task][answer["id"]].get(GRADED_AS, mine.cell.task) not in MATH_TASKS
        }

        def try_grade(key: Key) -> None:
            with suppress(ValueError):
                self.grade(key)

        with (
            progress_bar(total=len(answers), unit="answer", disable=not (progress and answers)) as bar,
            ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool,
        ):
            bar.set_description("running programs", refresh=False)
            for _ in pool.map(try_grade, answers):
                bar.update()

    def of(self, mine: Measured) -> Counts:
        """Counts of right answers of a cell. None: nothing was graded."""
        task = mine.cell.task
        if not is_graded(task):
            return None
        answers = mine.whole_answers(0)
        try:
            grades = [self.grade((task, answer["id"], answer["text"][-1])) for answer in answers]
        except ValueError as error:
            self.ungraded[task] = str(error)
            return None
        graded = [(grade, answer) for grade, answer in zip(grades, answers, strict=True) if grade.correct is not None]
        if not graded:
            return None
        correct = sum(bool(grade.correct) for grade, _ in graded)
        return {
            "correct": correct,
            "graded": len(graded),
            "share": correct / len(graded),
            "partial": sum(grade.is_partial for grade, _ in graded),
            "cut": sum(answer["finish"][-1] == "length" for _, answer in graded),
            "right": [answer["id"] for grade, answer in graded if grade.correct],
            "wrong": [answer["id"] for grade, answer in graded if not grade.correct],
        }

    def grade(self, key: Key) -> Grade:
        task, id, text = key
        if key not in self.grades:
            question = self.rows[task][id]
            self.grades[key] = self.grader(question.get(GRADED_AS, task), question, text)
        return self.grades[key]

    @property
    def notes(self) -> list[str]:
        return [f"{task} is not graded: {why}" for task, why in self.ungraded.items()]


def with_progress(cells: Collection[Measured], activity: str, progress: bool) -> Iterator[Measured]:
    with progress_bar(total=len(cells), unit="cell", disable=not (progress and cells)) as bar:
        for mine in cells:
            bar.set_description(f"{activity}: {mine.cell.method} {mine.cell.task}", refresh=sys.stderr.isatty())
            yield mine
            bar.update()


def grade_run(folder: Path, data_dir: str | None, progress: bool = False) -> dict[str, Any]:
    """Record of a finished run with new scores; all else is kept. Neither its target nor its machine is needed."""
    record = read_finished(folder)
    scores = Scores(read_questions(folder, record["recipe"], data_dir))
    measured = read_answers(folder, record["cells"])
    scores.run_programs(measured, progress)
    cells = []
    for raw, mine in zip(record["cells"], with_progress(measured, "grading", progress), strict=True):
        cells.append({**raw, "score": scores.of(mine)})
        check_kept(mine.cell.task, raw["score"], cells[-1]["score"], scores.ungraded)
    now = make_record({})
    versions = {name: version for name, version in now["versions"].items() if name in ("python", *GRADERS)}
    graded = {key: now[key] for key in ("command", "date", "commit")} | {"versions": versions}
    return {**record, "cells": cells, "ungraded": scores.notes, "graded": graded}


def read_finished(folder: Path) -> dict[str, Any]:
    for name in (RESULTS_FILE, ROWS_FILE, RUN_FILE):
        if not folder.is_dir() or not (folder / name).is_file():
            raise ValueError(f"{folder} is no folder of a finished `benchmarks run`: it has no {name}")
    record = dict(read_record(folder / RESULTS_FILE))
    if not {"cells", "recipe"} <= set(record):
        raise ValueError(f"{folder} holds no answers to grade")
    return record


def check_kept(task: str, before: Counts, now: Counts, why: Mapping[str, str]) -> None:
    """Refuse scores of fewer answers or tests than before."""
    if before is not None and (now is None or answered(before) - answered(now) or now["partial"] > before["partial"]):
        reason = why.get(task, "these questions have fewer references")
        raise ValueError(f"{task} would lose scores that the run has: {reason}")


def answered(score: Mapping[str, Any]) -> set[str]:
    return {*score["right"], *score["wrong"]}


def read_answers(folder: Path, cells: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """First repeats of the cells of a record."""
    firsts: dict[Cell, list[Row]] = {}
    rows = read_lines(folder / ROWS_FILE)
    for (cell, repeat, _), row in sorted(rows.items(), key=lambda item: item[0][1:]):
        if repeat == 0:
            firsts.setdefault(cell, []).append(row)
    found = [Cell(**{field.name: raw[field.name] for field in fields(Cell)}) for raw in cells]
    if lacking := next((cell for cell in found if cell not in firsts), None):
        raise ValueError(f"{folder / ROWS_FILE} has no answers of {lacking.method} on {lacking.task}")
    return [Measured(cell, [firsts[cell]]) for cell in found]


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
