"""Rows of a cell, and their statistics: speed, speedup over another cell, tokens per round.

An answer that failed counts in none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from statistics import median
from typing import Any

from benchmarks.estimate import Estimate
from benchmarks.recipe import Cell
from benchmarks.rows import Row

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """The rows of a cell, by repeat."""

    cell: Cell
    repeats: Sequence[Sequence[Row]]

    def beside(self, other: Measured) -> Measured:
        """The groups that another cell has, too."""
        groups = {tuple(row["ids"]) for rows in other.repeats for row in rows}
        kept = [[row for row in rows if tuple(row["ids"]) in groups] for rows in self.repeats]
        return Measured(self.cell, kept)

    @cached_property
    def answers(self) -> list[dict[str, Answer]]:
        """Answers by question, for every repeat."""
        return [{answer["id"]: answer for row in rows for answer in row["answers"]} for rows in self.repeats]

    @cached_property
    def whole_answers(self) -> list[list[Answer]]:
        """Answers that did not fail, by repeat."""
        return [[answer for answer in answers.values() if not answer["error"]] for answers in self.answers]

    @property
    def all_whole_answers(self) -> list[Answer]:
        return list(chain(*self.whole_answers))

    @property
    def tokens(self) -> int:
        return sum(map(num_tokens, self.all_whole_answers))

    @cached_property
    def timed(self) -> list[list[Row]]:
        """Rows whose time is that of whole answers, by repeat: the share of an answer that failed is not known."""

        def is_timed(answers: Sequence[Answer]) -> bool:
            return not all(a["error"] for a in answers) and not any(a["error"] and num_tokens(a) for a in answers)

        return [[row for row in rows if is_timed(row["answers"])] for rows in self.repeats]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of the repeats in which not everything failed."""
        return [speed for rows in self.timed if (speed := speed_of(rows)) is not None]

    @property
    def prefills(self) -> list[float]:
        """Seconds, per repeat."""
        return [sum(row["prefill_s"] for row in rows) for rows in self.timed]

    @property
    def fullest(self) -> int:
        """Most questions that were decoded together."""
        return max(len(row["ids"]) for rows in self.repeats for row in rows)

    @property
    def commands(self) -> list[set[int | None]]:
        """Commands of the folder that measured it, by repeat. None: a row does not tell."""
        return [{row.get("command") for row in rows} for rows in self.repeats]


def num_tokens(answer: Answer) -> int:
    return sum(answer["tokens"])


def speed_of(rows: Iterable[Row]) -> float | None:
    """Tokens per second of decoding. None: no time was measured."""
    seconds = sum(row["decode_s"] for row in rows)
    return sum(num_tokens(answer) for row in rows for answer in row["answers"]) / seconds if seconds > 0 else None


def speedup(mine: Measured, base: Measured | None) -> dict[str, Any] | None:
    """Ratio of speeds on the groups that both have, repeat by repeat, since the two took turns. With its deviation over
    repeats, and its standard error over questions where each was decoded alone.

    None where the two did not answer the same questions.
    """

    def counted(one: Measured) -> list[set[tuple[str, ...]]]:
        """Questions behind a speed, by repeat: those of timed groups that did not fail."""
        return [{tuple(a["id"] for a in row["answers"] if not a["error"]) for row in rows} for rows in one.timed]

    if base is None or counted(mine := mine.beside(base)) != counted(base := base.beside(mine)):
        return None
    pairs = zip(map(speed_of, mine.timed), map(speed_of, base.timed), strict=True)
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    questions = question_speedups(mine, base)
    if mine.cell == base.cell:
        ratios, questions = ratios[:1], {}
    found = Estimate.of_ratios(ratios, questions)
    if found is None:
        return None
    return {
        "over": base.cell.method,
        "mean": found.mean,
        "sd": found.sd,
        "se_questions": found.questions and found.questions.sd,
        "num_questions": len(questions),
        "questions": questions,
        "values": ratios,
        "differs": found.differs_from_1(),
    }


def question_speedups(mine: Measured, base: Measured) -> dict[str, float]:
    """Ratio of speeds on every question, the median over repeats; none where questions were decoded together."""
    found: dict[str, list[float]] = {}
    for rows, others in zip(mine.timed, base.timed, strict=True):
        speeds = {row["ids"][0]: speed_of([row]) for row in others}
        for row in rows:
            if len(row["ids"]) > 1:
                return {}
            speed, other = speed_of([row]), speeds[row["ids"][0]]
            if speed and other:
                found.setdefault(row["ids"][0], []).append(speed / other)
    return {id: median(ratios) for id, ratios in found.items()}


def tokens_per_round(mine: Measured) -> list[float]:
    """Per repeat, as far as rounds were counted."""
    counted = [[answer for answer in answers if answer["rounds"]] for answers in mine.whole_answers]
    return [sum(map(num_tokens, some)) / sum(answer["rounds"] for answer in some) for some in counted if some]


def round_questions(mine: Measured) -> dict[str, tuple[int, int]]:
    """Tokens and rounds of every question, in all repeats together."""
    found: dict[str, tuple[int, int]] = {}
    for answer in mine.all_whole_answers:
        if answer["rounds"]:
            tokens, rounds = found.get(answer["id"], (0, 0))
            found[answer["id"]] = tokens + num_tokens(answer), rounds + answer["rounds"]
    return found


def accepted_lengths(mine: Measured) -> list[int]:
    """Number of rounds that accepted 0, 1, 2, .. drafts."""
    return sum_columns(answer["accepted"] for answer in mine.all_whole_answers)


def sum_columns(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
