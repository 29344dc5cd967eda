"""Rows of a cell, and their statistics: speed, speedup over another cell, tokens per round.

An answer that failed counts in none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
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

    def answers(self, repeat: int) -> dict[str, Answer]:
        return {answer["id"]: answer for row in self.repeats[repeat] for answer in row["answers"]}

    def whole_answers(self, repeat: int) -> list[Answer]:
        """Answers that did not fail."""
        return [answer for answer in self.answers(repeat).values() if not answer["error"]]

    @property
    def all_whole_answers(self) -> list[Answer]:
        return [answer for repeat in range(len(self.repeats)) for answer in self.whole_answers(repeat)]

    @property
    def tokens(self) -> int:
        return sum(map(num_tokens, self.all_whole_answers))

    @cached_property
    def timed(self) -> list[list[Row]]:
        """Rows whose time is that of whole answers, by repeat: the share of an answer that failed is not known."""
        return [[row for row in rows if _is_timed(row)] for rows in self.repeats]

    @cached_property
    def speed_by_repeat(self) -> list[float | None]:
        """Tokens per second of decoding. None: everything failed."""
        speeds: list[float | None] = []
        for rows in self.timed:
            seconds = sum(row["decode_s"] for row in rows)
            tokens = sum(num_tokens(answer) for row in rows for answer in row["answers"])
            speeds.append(tokens / seconds if seconds > 0 else None)
        return speeds

    @property
    def speeds(self) -> list[float]:
        return [speed for speed in self.speed_by_repeat if speed is not None]

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

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [
            {"id": answer["id"], "repeat": repeat, "error": answer["error"]}
            for repeat in range(len(self.repeats))
            for answer in self.answers(repeat).values()
            if answer["error"]
        ]

    @property
    def counted(self) -> list[set[tuple[str, ...]]]:
        """Questions behind its speed, by repeat: those of timed groups that did not fail."""
        return [{tuple(a["id"] for a in row["answers"] if not a["error"]) for row in rows} for rows in self.timed]


def _is_timed(row: Row) -> bool:
    """There are whole answers, and none that failed half-way."""
    answers = row["answers"]
    return not all(a["error"] for a in answers) and not any(a["error"] and num_tokens(a) for a in answers)


def num_tokens(answer: Answer) -> int:
    return sum(answer["tokens"])


def speedup(mine: Measured, base: Measured | None) -> dict[str, Any] | None:
    """Ratio of speeds on the groups that both have, repeat by repeat, since the two took turns. With its deviation over
    repeats, and its standard error over questions where each was decoded alone.

    None where the two did not answer the same questions.
    """
    if base is None:
        return None
    mine, base = mine.beside(base), base.beside(mine)
    if mine.counted != base.counted:
        return None
    pairs = zip(mine.speed_by_repeat, base.speed_by_repeat, strict=True)
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
        speeds = {row["ids"][0]: row_speed(row) for row in others}
        for row in rows:
            if len(row["ids"]) > 1:
                return {}
            speed, other = row_speed(row), speeds[row["ids"][0]]
            if speed and other:
                found.setdefault(row["ids"][0], []).append(speed / other)
    return {id: median(ratios) for id, ratios in found.items()}


def row_speed(row: Row) -> float | None:
    """Tokens per second of decoding. None: no time was measured."""
    tokens = sum(map(num_tokens, row["answers"]))
    return tokens / row["decode_s"] if row["decode_s"] > 0 else None


def tokens_per_round(mine: Measured) -> list[float]:
    """Per repeat, as far as rounds were counted."""
    found = []
    for repeat in range(len(mine.repeats)):
        answers = [answer for answer in mine.whole_answers(repeat) if answer["rounds"]]
        if rounds := sum(answer["rounds"] for answer in answers):
            found.append(sum(map(num_tokens, answers)) / rounds)
    return found


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
