"""From rows to a record: speed with its spread, tokens per round, scores, and whether the text is the target's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from jetspec.bench.grade import MATH_TASKS, Grade, grade
from jetspec.bench.groups import Key, Row, measured_by, read_lines
from jetspec.bench.lossless import LosslessCheck
from jetspec.bench.measure import Bench, progress_bar
from jetspec.bench.measured import Measured, accepted_lengths, round_questions, speedup, tokens_per_round
from jetspec.bench.recipe import PLAIN, TRANSFORMERS, Cell
from jetspec.bench.runs import ROWS_FILE
from jetspec.bench.spread import how_many, to_record
from jetspec.bench.tasks import GRADED_AS, TASKS

Grader = Callable[[str, Mapping[str, Any], str], Grade]


def is_graded(task: str) -> bool:
    return task in TASKS and TASKS[task].grader is not None


@dataclass
class Results:
    """Turns the rows of a benchmark into its record."""

    bench: Bench
    rows: Mapping[Key, Row]
    grader: Grader = grade
    notes: list[str] = field(default_factory=list)
    """What a reader of the table should know."""
    _grades: dict[tuple[str, str, str], Grade] = field(default_factory=dict, init=False)

    def record(self, progress: bool = False) -> dict[str, Any]:
        decoder, config = self.bench.llm.target.decoder, self.bench.config
        self.notes += self._doubts()
        self.grade_programs(progress)
        cells = []
        with progress_bar(len(self.measured), "cell", progress) as bar:
            for cell, measured in self.measured.items():
                bar.set_description(f"grading and comparing: {cell.method} {cell.task}", refresh=sys.stderr.isatty())
                cells.append(self.cell(measured))
                bar.update()
        return {
            **measured_by(self.rows.values(), self.bench.runs()),
            "model": self.bench.llm.model_name,
            "dtype": str(decoder.embedding.dtype).removeprefix("torch."),
            "device": decoder.embedding.device.type,
            **self.bench.weights(),
            "recipe": config.to_dict(self.bench.methods),
            "noise": self.lossless.noise_record(),
            "cells": cells,
            "notes": self.notes,
            "runs": self.bench.runs(),
        }

    def _doubts(self) -> list[str]:
        """What cells do not show: batches that were never full, and rows of several commands or sources."""
        found = [*self._short_batches(), *self._apart()]
        if unused := len(read_lines(self.bench.folder / ROWS_FILE)[0]) - len(self.rows):
            found.append(f"the folder holds {how_many(unused, 'more group')} that this command did not ask for")
        for name, fields in self.bench.left_open().items():
            if fields:
                found.append(
                    f"{name} was asked without {', '.join(fields)}: what its server takes instead is not known"
                )
        if len(commits := self.bench.commits()) > 1:
            found.append(f"measured by several versions of the source, one after the other: {', '.join(commits)}")
        return found

    def _short_batches(self) -> Iterator[str]:
        """A method that is asked fewer questions than a batch holds has a smaller batch than its cell says."""
        methods: dict[tuple[str, int], set[str]] = {}
        short: dict[tuple[str, int, int], set[str]] = {}
        for cell, measured in self.measured.items():
            methods.setdefault((cell.task, cell.batch), set()).add(cell.method)
            if measured.fullest < cell.batch:
                short.setdefault((cell.task, cell.batch, measured.fullest), set()).add(cell.method)
        for (task, batch, count), names in short.items():
            everybody = names == methods[task, batch]
            who = "there are" if everybody else f"{' and '.join(sorted(names))} got"
            yield f"{task} in batches of {batch}: {who} only {how_many(count, 'question')}"

    def _apart(self) -> Iterator[str]:
        """Methods take turns within a command. Between two of them the machine may have become another."""
        apart: dict[str, None] = {}
        for cell, measured in self.measured.items():
            plain = self.measured[cell.beside(PLAIN, 1)]
            if measured.beside(plain).commands != plain.beside(measured).commands:
                apart[cell.method] = None
        if apart:
            names = ", ".join(apart)
            yield f"measured, in part, by another command than the plain decoding that they are compared with: {names}"

    @cached_property
    def measured(self) -> dict[Cell, Measured]:
        found: dict[Cell, list[list[Row]]] = {}
        for (cell, repeat, _), row in sorted(self.rows.items(), key=lambda item: item[0][1:]):
            repeats = found.setdefault(cell, [[] for _ in range(self.bench.config.repeats)])
            repeats[repeat].append(row)
        order = [cell for method in self.bench.methods for cell in self.bench.config.cells(method)]
        return {cell: Measured(cell, found[cell]) for cell in order}

    def cell(self, mine: Measured) -> dict[str, Any]:
        plain = self.measured[mine.cell.beside(PLAIN, 1)]
        rounds = round_questions(mine)
        return {
            **asdict(mine.cell),
            "questions": len(mine.answers(0)),
            "together": mine.fullest,
            "tokens": mine.tokens,
            "tokens_per_s": to_record(mine.speeds),
            "tokens_per_round": {
                **to_record(tokens_per_round(mine)),
                "questions": list(rounds.values()),
                "ids": list(rounds),
            },
            "accepted": accepted_lengths(mine),
            "prefill_s": to_record(mine.prefills),
            "speedup": speedup(mine, plain),
            "speedup_transformers": speedup(mine, self.measured.get(mine.cell.beside(TRANSFORMERS, None))),
            "score": self.score(mine),
            "lossless": self.lossless.of(mine, plain) if mine is not plain else None,
            "errors": mine.errors,
        }

    def score(self, mine: Measured) -> dict[str, Any] | None:
        """Of the first repeat: later ones ask the same questions, and would only look like more of them."""
        task = mine.cell.task
        if not is_graded(task):
            return None
        answers = mine.whole_answers(0)
        try:
            grades = [self.grade(task, answer["id"], answer["text"][-1]) for answer in answers]
        except ValueError as error:
            note = f"{task} is not graded: {error}"
            if note not in self.notes:
                self.notes.append(note)
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

    def grade(self, task: str, id: str, text: str) -> Grade:
        """The same answer to the same question is graded once, whoever gave it."""
        key = task, id, text
        if key not in self._grades:
            question = self.question_rows[task][id]
            self._grades[key] = self.grader(question.get(GRADED_AS, task), question, text)
        return self._grades[key]

    def grade_programs(self, progress: bool = False) -> None:
        """Several at a time: each runs in a process of its own, up to its last second if it never ends. Mathematics is
        graded where the clock of its library works, in the thread that asks. What cannot be graded is left for later.
        """
        answers = {
            (cell.task, answer["id"], answer["text"][-1]): None
            for cell, mine in self.measured.items()
            if is_graded(cell.task)
            for answer in mine.whole_answers(0)
            if self.question_rows[cell.task][answer["id"]].get(GRADED_AS, cell.task) not in MATH_TASKS
        }

        def try_grade(key: tuple[str, str, str]) -> None:
            with suppress(ValueError):
                self.grade(*key)

        with (
            progress_bar(len(answers), "answer", progress) as bar,
            ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool,
        ):
            bar.set_description("running programs", refresh=False)
            for _ in pool.map(try_grade, answers):
                bar.update()

    @cached_property
    def question_rows(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """Task -> id -> line of the task's file."""
        return {task: {prompt.id: prompt.row for prompt in prompts} for task, prompts in self.bench.questions.items()}

    @cached_property
    def lossless(self) -> LosslessCheck:
        return LosslessCheck(self.bench, [measured for cell, measured in self.measured.items() if cell.method == PLAIN])
