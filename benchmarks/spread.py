"""Numbers with how much they vary, and when two of them differ: the one rule that every table goes by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NO_DIFFERENCE = "no difference"
SPREADS = 2
"""Values that differ are more than this many standard deviations apart."""
STUDENT = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
"""With 1, 2, .. degrees of freedom, Student's t is larger than this, either way, once in a hundred times."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over repeats. None: a single repeat has no deviation."""

    mean: float
    sd: float | None = None
    error: float = 0.0
    """Of the mean: what the deviation leaves of itself in a mean of so many repeats."""
    freedom: float = math.inf
    """Degrees of freedom of the deviation: few repeats may vary little by chance."""
    values: tuple[float, ...] = ()
    """Of the repeats, in their order."""
    is_ratio: bool = False
    """Whether the mean is the geometric one."""
    questions: Spread | None = None
    """Of a ratio the geometric mean over questions, each counting the same, with its standard error: repeats ask the
    same, and others might have moved it further. None: not known."""
    asked: tuple[Mapping[str, float], ...] = field(default=(), compare=False)
    """Where the deviation is the standard error over questions: what each of them, by its name, came to, task by task.
    Their mean is this one; of a ratio they are logarithms. Empty: not known."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None: there are no values, as where everything failed."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values=tuple(values))
        sd = statistics.stdev(values)
        return cls(statistics.fmean(values), sd, sd / math.sqrt(len(values)), len(values) - 1, tuple(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], questions: Mapping[str, float] | None = None) -> Spread | None:
        """Their geometric mean: turned upside down, ratios have the inverse mean and vary as much.

        `values` are those of repeats, `questions` those of every question by its name.
        """
        logs = cls.of([math.log(value) for value in values])
        if logs is None:
            return None
        each = {name: math.log(value) for name, value in (questions or {}).items()}
        asked = cls._over_questions(list(each.values()))
        return replace(logs.exp(), values=tuple(values), questions=asked and replace(asked, asked=(each,)).exp())

    @classmethod
    def _over_questions(cls, values: Sequence[float]) -> Spread | None:
        """Their mean, and its standard error for its deviation. None: one question says nothing of others."""
        found = cls.of(values)
        if found is None or found.sd is None:
            return None
        return cls(found.mean, found.error, found.error, found.freedom)

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[float, float]], names: Sequence[str] = ()) -> Spread | None:
        """The quotient of two sums over questions, and how far other questions might have moved it: its deviation is
        the standard error. With names of the questions, what each of them moves it by is known, too."""
        below = sum(b for _, b in parts)
        if not below:
            return None
        ratio, count = sum(a for a, _ in parts) / below, len(parts)
        if count == 1:
            return cls(ratio)
        each = [ratio + (a - ratio * b) * count / below for a, b in parts]
        found = cls._over_questions(each)
        assert found is not None
        return replace(found, asked=(dict(zip(names, each, strict=True)),) if names else ())

    @classmethod
    def read_ratios(cls, raw: Mapping[str, Any] | None) -> Spread | None:
        """From a record."""
        if raw is None:
            return None
        found = cls.of_ratios(raw["values"], raw.get("questions"))
        if found is None or found.questions is not None or raw.get("se_questions") is None:
            return found
        # Of those that say no more of questions than their error.
        error, count = raw["se_questions"], raw["num_questions"]
        return replace(found, questions=cls(found.mean, error, error, count - 1, is_ratio=True))

    @classmethod
    def average(cls, parts: Iterable[Spread]) -> Spread:
        """Of what was measured in the same repeats, each counting the same: a machine that is slow in one of them is so
        in all. Where not all have every repeat, they are taken to vary together. Of ratios it is the geometric mean:
        twice as fast here and half as fast there is as fast."""
        parts = list(parts)
        if parts[0].is_ratio:
            return cls.average([part.log() for part in parts]).exp()
        asked = [part.questions for part in parts if part.questions is not None]
        questions = cls.independent(asked) if len(asked) == len(parts) else None
        if len({len(part.values) for part in parts}) == 1 and parts[0].values:
            repeats = [statistics.fmean(column) for column in zip(*(part.values for part in parts), strict=True)]
            found = cls.of(repeats)
            assert found is not None
            return replace(found, questions=questions)
        known = [part.sd for part in parts if part.sd is not None]
        sd = statistics.fmean(known) if len(known) == len(parts) else None
        mean, error = (statistics.fmean(values) for values in zip(*((p.mean, p.error) for p in parts), strict=True))
        return cls(mean, sd, error, min(part.freedom for part in parts), questions=questions)

    @classmethod
    def independent(cls, parts: Iterable[Spread]) -> Spread:
        """The mean of what has nothing in common, such as the questions of several tasks."""
        parts = list(parts)
        known = [part.sd for part in parts if part.sd is not None]
        sd = math.hypot(*known) / len(parts) if len(known) == len(parts) else None
        error = math.hypot(*(part.error for part in parts)) / len(parts)
        asked = tuple(task for part in parts for task in part.asked) if all(part.asked for part in parts) else ()
        return cls(sum(part.mean for part in parts) / len(parts), sd, error, _freedom(parts), asked=asked)

    def log(self) -> Spread:
        """Of a ratio, whose logarithms are what varies alike in both directions."""
        sd = None if self.sd is None else self.sd / self.mean
        values = tuple(math.log(value) for value in self.values)
        questions = self.questions.log() if self.questions else None
        error = self.error / self.mean
        return Spread(math.log(self.mean), sd, error, self.freedom, values, False, questions, self.asked)

    def exp(self) -> Spread:
        """The ratio that has this logarithm."""
        mean = math.exp(self.mean)
        sd = None if self.sd is None else mean * self.sd
        values = tuple(math.exp(value) for value in self.values)
        questions = self.questions.exp() if self.questions else None
        return Spread(mean, sd, mean * self.error, self.freedom, values, True, questions, self.asked)

    def times(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.mean * factor, None if self.sd is None else self.sd * factor)

    def over(self, other: Spread) -> Spread:
        """The quotient of two independent values; relative deviations add as squares."""
        ratio = self.mean / other.mean
        if self.sd is None or other.sd is None:
            return Spread(ratio)
        return Spread(ratio, ratio * math.hypot(self.sd / self.mean, other.sd / other.mean))

    def differs(self, other: Spread) -> bool | None:
        """Whether the two lie further apart than their spreads, and than chance, explain: over repeats, and where it is
        known also over questions.

        None: there is no spread to judge by.
        """
        if self.sd is None or other.sd is None:
            return None
        if (paired := self._paired(other)) is not None:
            return paired.differs(NOTHING)
        if (asked := self._by_questions(other)) is not None and not asked[0].differs(asked[1]):
            return False
        by_chance = student(_freedom((self, other))) * math.hypot(self.error, other.error)
        return not self.is_near(other) and abs(self.mean - other.mean) > by_chance

    def is_near(self, other: Spread) -> bool:
        """Whether the two lie within what their spreads explain, over repeats or over questions, or these do not agree
        which is the larger. Without a spread nothing is near."""
        if self.sd is None or other.sd is None:
            return False
        if self.is_ratio and other.is_ratio:
            return self.log().is_near(other.log())
        if (paired := self._paired(other)) is not None:
            return paired.is_near(NOTHING)
        if (asked := self._by_questions(other)) is not None:
            a, b = asked
            if a.is_near(b) or (a.mean - b.mean) * (self.mean - other.mean) < 0:
                return True
        return abs(self.mean - other.mean) <= SPREADS * self._deviation(other)

    def _deviation(self, other: Spread) -> float:
        """Of the difference of the two. What slows a machine down in a repeat slows both down."""
        if len(self.values) == len(other.values) > 1:
            return statistics.stdev(a - b for a, b in zip(self.values, other.values, strict=True))
        assert self.sd is not None and other.sd is not None
        return math.hypot(self.sd, other.sd)

    def _by_questions(self, other: Spread) -> tuple[Spread, Spread] | None:
        """The two with their errors over questions. None: not known of either."""
        if self.questions is None and other.questions is None:
            return None
        return self.questions or self, other.questions or other

    def _paired(self, other: Spread) -> Spread | None:
        """How far the two lie apart on the questions, and the error of that: what a question does to both alike is no
        part of it. None: they were not asked the same, or it is not known."""
        if not self.asked or [task.keys() for task in self.asked] != [task.keys() for task in other.asked]:
            return None
        tasks = zip(self.asked, other.asked, strict=True)
        apart = [Spread.of([mine[name] - its[name] for name in mine]) for mine, its in tasks]
        found = Spread.independent([task for task in apart if task is not None])
        return Spread(found.mean, found.error, found.error, found.freedom)

    def differs_from_1(self) -> bool | None:
        """For a ratio, and in its logarithm: twice as fast is as far from 1 as half as fast."""
        return self.log().differs(NOTHING)

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def text(self, digits: int = 2) -> str:
        """Small numbers have more digits, so that two of them say something."""
        if 0 < abs(self.mean) < 0.1:
            digits = max(digits, 1 - math.floor(math.log10(abs(self.mean))))
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


NOTHING = Spread(0.0, 0.0)


def student(freedom: float) -> float:
    """How many standard errors chance alone exceeds once in a hundred times, either way."""
    if freedom <= len(STUDENT):
        return STUDENT[max(math.floor(freedom), 1) - 1]
    return 2.5758 + 4.9165 / freedom + 8.834 / freedom**2  # the quantile's expansion around that of a normal variable


def _freedom(parts: Iterable[Spread]) -> float:
    """Of a sum, after Welch and Satterthwaite: near that of the part that varies most."""
    known = [(part.error**2, part.freedom) for part in parts]
    total = sum(square for square, _ in known)
    lost = sum((square / total) ** 2 / freedom for square, freedom in known) if total > 0 else 0.0
    return 1 / lost if lost > 0 else math.inf


def to_record(values: Sequence[float]) -> dict[str, Any]:
    """Every value, with mean, deviation and median."""
    found = Spread.of(values)
    about = {"mean": found and found.mean, "sd": found and found.sd, "median": found and found.median}
    return {**about, "values": list(values)}


def how_many(number: int, thing: str) -> str:
    """1 question, 2 questions."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def speedup_text(value: Spread) -> str:
    """Marked where it is not more than the spread."""
    return value.text() if value.differs_from_1() is not False else f"≈ {value.text()}"
