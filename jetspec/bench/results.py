"""From rows to a record: speed with its spread, tokens per round, scores, and whether the text is the target's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from jetspec.bench.grade import Grade, grade
from jetspec.bench.groups import Key, Row
from jetspec.bench.measure import Bench
from jetspec.bench.precision import FreshPass, find_differences
from jetspec.bench.recipe import PLAIN, TRANSFORMERS, Cell
from jetspec.bench.spread import ONE, Spread, to_record
from jetspec.bench.tasks import GRADED_AS, TASKS
from jetspec.train.prompts import Prompt
from jetspec.train.regenerate import Conversation
from jetspec.tree.sample import filter_logits, gumbel
from jetspec.types import RowSampling, SamplingParams

OTHER_PROMPT = "other prompt"
"""Why the text of a server differs that read its own earlier words as other tokens than we do."""


@dataclass(frozen=True)
class Measured:
    """The rows of a cell, by repeat."""

    cell: Cell
    repeats: Sequence[Sequence[Row]]

    def beside(self, other: Measured) -> Measured:
        """Only the groups that another one has, too."""
        groups = {tuple(row["ids"]) for rows in other.repeats for row in rows}
        kept = [[row for row in rows if tuple(row["ids"]) in groups] for rows in self.repeats]
        return Measured(self.cell, kept)

    def answers(self, repeat: int) -> dict[str, Mapping[str, Any]]:
        return {answer["id"]: answer for row in self.repeats[repeat] for answer in row["answers"]}

    @property
    def all_answers(self) -> list[Mapping[str, Any]]:
        return [answer for repeat in range(len(self.repeats)) for answer in self.answers(repeat).values()]

    @cached_property
    def speeds(self) -> list[float]:
        """Tokens per second of decoding, per repeat. One in which everything failed has none."""
        speeds = []
        for rows in self.repeats:
            seconds = sum(row["decode_s"] for row in rows)
            if seconds > 0:
                speeds.append(sum(sum(a["tokens"]) for row in rows for a in row["answers"]) / seconds)
        return speeds

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [
            {"id": answer["id"], "repeat": repeat, "error": answer["error"]}
            for repeat in range(len(self.repeats))
            for answer in self.answers(repeat).values()
            if answer["error"]
        ]

    @property
    def failed(self) -> list[tuple[str, int]]:
        return [(error["id"], error["repeat"]) for error in self.errors]


def speedup(mine: Measured, base: Measured | None) -> dict[str, Any] | None:
    """The ratio of mean speeds on the groups that both were given, with the spread of both.

    None where the two did not answer the same questions of these. Without repeats there is no spread, and no
    difference is claimed.
    """
    if base is None:
        return None
    mine, base = mine.beside(base), base.beside(mine)
    a, b = Spread.of(mine.speeds), Spread.of(base.speeds)
    if a is None or b is None or mine.failed != base.failed:
        return None
    ratio = a.over(b)
    return {"over": base.cell.method, **asdict(ratio), "differs": bool(ratio.differs(ONE))}


def acceptance(mine: Measured) -> tuple[float | None, list[int]]:
    """Tokens per round, and how many rounds kept 0, 1, 2, .. drafts; None where nobody could count rounds."""
    answers = [answer for answer in mine.all_answers if answer["rounds"] is not None]
    counts = [sum(column) for column in zip_longest(*(answer["accepted"] for answer in answers), fillvalue=0)]
    rounds = sum(answer["rounds"] for answer in answers)
    return (sum(sum(answer["tokens"]) for answer in answers) / rounds if rounds else None), counts


Grader = Callable[[str, Mapping[str, Any], str], Grade]


@dataclass
class Results:
    """Turns the rows of a benchmark into its record."""

    bench: Bench
    rows: Mapping[Key, Row]
    grader: Grader = grade
    notes: list[str] = field(default_factory=list)
    """What a reader of the table should know."""

    def record(self) -> dict[str, Any]:
        decoder, config = self.bench.llm.target.decoder, self.bench.config
        self.notes += self._doubts()
        return {
            "model": self.bench.llm.model_name,
            "dtype": str(decoder.embedding.dtype).removeprefix("torch."),
            "device": decoder.embedding.device.type,
            "recipe": config.to_dict(self.bench.methods),
            "cells": [self.cell(measured) for measured in self.measured.values()],
            "notes": self.notes,
            "runs": self.bench.runs(),
        }

    def _doubts(self) -> list[str]:
        """What cells do not show: batches that were never full, and rows of several sources."""
        fullest: dict[tuple[str, int], int] = {}
        for (cell, _, _), row in self.rows.items():
            place = cell.task, cell.batch
            fullest[place] = max(fullest.get(place, 0), len(row["ids"]))
        short = {place: count for place, count in fullest.items() if count < place[1]}
        found = [f"{task} in batches of {batch}: there are only {n} questions" for (task, batch), n in short.items()]
        if len(commits := self.bench.commits()) > 1:
            found.append(f"measured by several versions of the source, one after the other: {', '.join(commits)}")
        return found

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
        per_round, counts = acceptance(mine)
        return {
            **asdict(mine.cell),
            "questions": len(mine.answers(0)),
            "tokens": sum(sum(answer["tokens"]) for answer in mine.all_answers),
            "tokens_per_s": to_record(mine.speeds),
            "tokens_per_round": per_round,
            "accepted": counts,
            "prefill_s": to_record([sum(row["prefill_s"] for row in rows) for rows in mine.repeats]),
            "speedup": speedup(mine, plain),
            "speedup_transformers": speedup(mine, self.measured.get(mine.cell.beside(TRANSFORMERS, None))),
            "score": self.score(mine),
            "lossless": self.lossless.of(mine, plain) if mine is not plain else None,
            "errors": mine.errors,
        }

    def score(self, mine: Measured) -> dict[str, Any] | None:
        """Of the first repeat: later ones ask the same questions, and would only look like more of them."""
        task = mine.cell.task
        if task not in TASKS or TASKS[task].grader is None:
            return None
        questions = {prompt.id: prompt.row for prompt in self.bench.questions[task]}
        answers = [answer for answer in mine.answers(0).values() if not answer["error"]]
        try:
            grades = [self.grade(task, answer["id"], questions[answer["id"]], answer["text"][-1]) for answer in answers]
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
        }

    def grade(self, task: str, id: str, question: Mapping[str, Any], text: str) -> Grade:
        """The same answer to the same question is graded once, whoever gave it."""
        key = task, id, text
        if key not in self._grades:
            self._grades[key] = self.grader(question.get(GRADED_AS, task), question, text)
        return self._grades[key]

    @cached_property
    def _grades(self) -> dict[tuple[str, str, str], Grade]:
        return {}

    @cached_property
    def lossless(self) -> LosslessCheck:
        return LosslessCheck(self.bench)


class LosslessCheck:
    """Compares answers with those of plain decoding, token by token.

    Greedy answers of everybody are compared, and drawn ones of our engine, which draws by seed and position alone. In
    float32 they must be the same. A difference is listed with the gap between its two tokens under the target: how far
    the worse of them lay behind the best, noise of the draw included. The texts of servers are cut up again first.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.methods = {method.name: method for method in bench.methods}

    @cached_property
    def fresh(self) -> FreshPass:
        return FreshPass(self.bench.llm.target.decoder, None, self.bench.max_len)

    def of(self, mine: Measured, plain: Measured) -> dict[str, Any] | None:
        method, temperature = self.methods[mine.cell.method], mine.cell.temperature
        if temperature > 0 and not method.is_ours:
            return None
        is_text = method.url is not None
        check = "seeded tokens" if temperature > 0 else "greedy text" if is_text else "greedy tokens"
        prompts = {prompt.id: prompt for prompt in self.bench.questions[mine.cell.task]}
        compared, different = 0, []
        for repeat in range(len(mine.repeats)):
            others = plain.answers(repeat)
            for id, answer in mine.answers(repeat).items():
                if answer["error"] or others[id]["error"]:
                    continue
                compared += 1
                found = self.first_difference(prompts[id], others[id], answer, repeat, temperature, is_text)
                if found is not None:
                    different.append({"id": id, "repeat": repeat, **found})
        return {"check": check, "compared": compared, "identical": compared - len(different), "different": different}

    def first_difference(
        self,
        prompt: Prompt,
        plain: Mapping[str, Any],
        mine: Mapping[str, Any],
        repeat: int,
        temperature: float,
        is_text: bool,
    ) -> dict[str, Any] | None:
        """The first turn that differs, and where; turns after it answer another conversation."""
        talk = Conversation(prompt, self.bench.llm.tokenizer, **self.bench.variables)
        for turn, (expected, given) in enumerate(zip(plain["turn_tokens"], mine["turn_tokens"], strict=True)):
            if turn in mine.get("other_prompts", ()):
                return {"turn": turn, "position": 0, "gap": None, "why": OTHER_PROMPT}
            asked = talk.with_next_turn() if turn else talk.token_ids
            talk.token_ids = asked
            talk.answer(expected, plain["finish"][turn])
            if is_text:
                expected = self.bench.llm.tokenizer.encode_words(plain["text"][turn])
            sampling = self.bench.config.sampling(temperature, repeat, prompt.id, turn)
            judge = self.fresh if temperature == 0 else DrawnPass(self.fresh, sampling)
            for found in find_differences({"": asked}, {"": expected}, {"": given}, judge):
                return {"turn": turn, "position": found.place, "gap": found.gap}
        return None


@dataclass(frozen=True)
class DrawnPass:
    """A fresh pass with the noise of a draw: the token that was drawn is the one with the best of these logits."""

    fresh: FreshPass
    sampling: SamplingParams

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What the token after these was chosen by, (1, V), in units of logits."""
        assert self.sampling.seed is not None
        logits_1V = self.fresh.logits(tokens)
        row = RowSampling.of([self.sampling], [self.sampling.seed], logits_1V.device)
        position = torch.tensor([len(tokens)], device=logits_1V.device)
        drawn = filter_logits(logits_1V, row) + gumbel(row.seed_B, position, logits_1V.shape[-1])
        return drawn * self.sampling.temperature
