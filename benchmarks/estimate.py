"""Means with their uncertainty, and the one rule that decides when two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from scipy import stats

NO_DIFFERENCE = "no difference"
NEAR_SDS = 2
"""Values within this many standard deviations of their difference are near each other."""
CONFIDENCE = 0.995
"""Quantile of Student's t that a difference must exceed: once in a hundred times by chance, either way."""


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation over repeats. A ratio is held by its logarithm: both directions vary alike."""

    center: float
    """Mean, or the mean logarithm of a ratio."""
    spread: float | None = None
    """Standard deviation of the same. None: a single repeat."""
    error: float = 0.0
    """Standard error of the mean."""
    freedom: float = math.inf
    """Degrees of freedom of the deviation."""
    values: tuple[float, ...] = ()
    """Values of the repeats, in order."""
    is_ratio: bool = False
    questions: Estimate | None = None
    """Mean of a ratio over questions, each counting the same, with its standard error. None: not known."""
    asked: tuple[Mapping[str, float], ...] = field(default=(), compare=False)
    """Value of each question by name, task by task, where the deviation is the standard error over questions."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Estimate from repeats. None: there are no values."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values=tuple(values))
        sd = statistics.stdev(values)
        return cls(statistics.fmean(values), sd, sd / math.sqrt(len(values)), len(values) - 1, tuple(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], questions: Mapping[str, float] | None = None) -> Estimate | None:
        """Geometric mean of the ratios of repeats; `questions` holds the ratio of each question by name."""
        found = cls.of([math.log(value) for value in values])
        asked = cls._over_questions(list(map(math.log, (questions or {}).values())), list(questions or {}), True)
        return found and replace(found, values=tuple(values), is_ratio=True, questions=asked)

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[float, float]], names: Sequence[str] = ()) -> Estimate | None:
        """Quotient of two sums over questions; its deviation is the standard error over questions."""
        below = sum(b for _, b in parts)
        if not below:
            return None
        ratio, count = sum(a for a, _ in parts) / below, len(parts)
        each = [ratio + (a - ratio * b) * count / below for a, b in parts]
        return cls._over_questions(each, names) or cls(ratio)

    @classmethod
    def _over_questions(cls, values: Sequence[float], names: Sequence[str], is_ratio: bool = False) -> Estimate | None:
        """Mean with its standard error in place of the deviation. None: one question tells nothing of others."""
        found = cls.of(values)
        if found is None or found.spread is None:
            return None
        asked = (dict(zip(names, values, strict=True)),) if names else ()
        return cls(found.center, found.error, found.error, found.freedom, is_ratio=is_ratio, asked=asked)

    @classmethod
    def read_ratios(cls, raw: Mapping[str, Any] | None) -> Estimate | None:
        """Ratio from a record. Older ones hold the error over questions, not the questions."""
        if raw is None:
            return None
        found = cls.of_ratios(raw["values"], raw.get("questions"))
        if found is None or found.questions is not None or raw.get("se_questions") is None:
            return found
        error = raw["se_questions"] / found.mean
        return replace(found, questions=cls(found.center, error, error, raw["num_questions"] - 1, is_ratio=True))

    @classmethod
    def average(cls, parts: Iterable[Estimate]) -> Estimate:
        """Mean of values measured in the same repeats. Where some lack a repeat, all are taken to vary together."""
        parts = list(parts)
        is_ratio = parts[0].is_ratio
        asked = [part.questions for part in parts if part.questions is not None]
        questions = cls.independent(asked) if len(asked) == len(parts) else None
        if len({len(part.values) for part in parts}) == 1 and parts[0].values:
            repeats = [statistics.fmean(column) for column in zip(*(part.scaled for part in parts), strict=True)]
            found = cls.of(repeats)
            assert found is not None
            values = tuple(map(math.exp, repeats)) if is_ratio else found.values
            return replace(found, values=values, is_ratio=is_ratio, questions=questions)
        center, error = (statistics.fmean(found) for found in zip(*((p.center, p.error) for p in parts), strict=True))
        spreads = [part.spread for part in parts if part.spread is not None]
        spread = statistics.fmean(spreads) if len(spreads) == len(parts) else None
        return cls(center, spread, error, min(p.freedom for p in parts), (), is_ratio, questions)

    @classmethod
    def independent(cls, parts: Iterable[Estimate]) -> Estimate:
        """Mean of independent values, such as those of the questions of several tasks."""
        parts = list(parts)
        known = [part.spread for part in parts if part.spread is not None]
        spread = math.hypot(*known) / len(parts) if len(known) == len(parts) else None
        error = math.hypot(*(part.error for part in parts)) / len(parts)
        asked = tuple(task for part in parts for task in part.asked) if all(part.asked for part in parts) else ()
        center = sum(part.center for part in parts) / len(parts)
        return cls(center, spread, error, welch_freedom(parts), (), parts[0].is_ratio, asked=asked)

    @property
    def mean(self) -> float:
        return math.exp(self.center) if self.is_ratio else self.center

    @property
    def sd(self) -> float | None:
        return self.spread if self.spread is None or not self.is_ratio else self.mean * self.spread

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def scaled(self) -> tuple[float, ...]:
        """Values of the repeats; of a ratio their logarithms."""
        return tuple(map(math.log, self.values)) if self.is_ratio else self.values

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(self.mean * factor, None if self.sd is None else self.sd * factor)

    def over(self, other: Estimate) -> Estimate:
        """Quotient of two independent values; relative deviations add as squares."""
        ratio = self.mean / other.mean
        if self.sd is None or other.sd is None:
            return Estimate(ratio)
        return Estimate(ratio, ratio * math.hypot(self.sd / self.mean, other.sd / other.mean))

    def differs(self, other: Estimate) -> bool | None:
        """The two are further apart than deviations and chance explain, over repeats and questions. None: unknown."""
        if self.spread is None or other.spread is None:
            return None
        if (paired := self._paired(other)) is not None:
            return paired.differs(ZERO)
        if (asked := self._by_questions(other)) is not None and not asked[0].differs(asked[1]):
            return False
        by_chance = student(welch_freedom((self, other))) * math.hypot(self.error, other.error)
        return not self.is_near(other) and abs(self.center - other.center) > by_chance

    def differs_from_1(self) -> bool | None:
        """For a ratio: twice as fast is as far from 1 as half as fast."""
        return self.differs(ZERO)

    def is_near(self, other: Estimate) -> bool:
        """The two are within their deviations, or repeats and questions disagree about the larger one."""
        if self.spread is None or other.spread is None:
            return False
        if (paired := self._paired(other)) is not None:
            return paired.is_near(ZERO)
        if (asked := self._by_questions(other)) is not None:
            a, b = asked
            if a.is_near(b) or (a.center - b.center) * (self.center - other.center) < 0:
                return True
        if len(self.values) == len(other.values) > 1:  # a slow repeat slows both
            deviation = statistics.stdev(a - b for a, b in zip(self.scaled, other.scaled, strict=True))
        else:
            deviation = math.hypot(self.spread, other.spread)
        return abs(self.center - other.center) <= NEAR_SDS * deviation

    def _by_questions(self, other: Estimate) -> tuple[Estimate, Estimate] | None:
        """Both with their errors over questions. None: known of neither."""
        if self.questions is None and other.questions is None:
            return None
        return self.questions or self, other.questions or other

    def _paired(self, other: Estimate) -> Estimate | None:
        """Mean difference over the same questions, with its error. None: other questions, or not known."""
        if not self.asked or [task.keys() for task in self.asked] != [task.keys() for task in other.asked]:
            return None
        tasks = zip(self.asked, other.asked, strict=True)
        apart = [Estimate.of([mine[name] - its[name] for name in mine]) for mine, its in tasks]
        found = Estimate.independent([task for task in apart if task is not None])
        return Estimate(found.center, found.error, found.error, found.freedom)

    def text(self, digits: int = 2) -> str:
        """Mean ± deviation. Numbers below 0.1 get two significant digits."""
        if 0 < abs(self.mean) < 0.1:
            digits = max(digits, 1 - math.floor(math.log10(abs(self.mean))))
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


ZERO = Estimate(0.0, 0.0)


@lru_cache(1024)
def student(freedom: float) -> float:
    """Standard errors that chance exceeds once in a hundred times. Few degrees of freedom are rounded down."""
    return float(stats.t.ppf(CONFIDENCE, max(math.floor(freedom), 1) if freedom <= 10 else freedom))


def welch_freedom(parts: Iterable[Estimate]) -> float:
    """Degrees of freedom of a sum, after Welch and Satterthwaite."""
    known = [(part.error**2, part.freedom) for part in parts]
    total = sum(square for square, _ in known)
    lost = sum((square / total) ** 2 / freedom for square, freedom in known) if total > 0 else 0.0
    return 1 / lost if lost > 0 else math.inf


def to_record(values: Sequence[float]) -> dict[str, Any]:
    found = Estimate.of(values)
    about = {"mean": found and found.mean, "sd": found and found.sd, "median": found and found.median}
    return {**about, "values": list(values)}


def how_many(number: int, thing: str) -> str:
    """1 question, 2 questions."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def speedup_text(value: Estimate) -> str:
    """Speedup, marked where it is not shown to differ from 1."""
    return value.text() if value.differs_from_1() is not False else f"≈ {value.text()}"
