"""Numbers with how much they vary, and when two of them differ: the one rule that every table goes by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_DIFFERENCE = "no difference"
SPREADS = 2
"""Values differ when they are more than this many standard deviations apart."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over repeats. None: a single repeat has no deviation."""

    mean: float
    sd: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None: there are no values, as where everything failed."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> Spread | None:
        """From a record."""
        return None if raw is None or raw["mean"] is None else cls(float(raw["mean"]), raw["sd"])

    @classmethod
    def average(cls, parts: Iterable[Spread]) -> Spread:
        """Of independent measurements, each counting the same."""
        parts = list(parts)
        known = [part.sd for part in parts if part.sd is not None]
        sd = math.sqrt(sum(x * x for x in known)) / len(parts) if len(known) == len(parts) else None
        return cls(sum(part.mean for part in parts) / len(parts), sd)

    def over(self, other: Spread) -> Spread:
        """The quotient; relative deviations add as squares."""
        ratio = self.mean / other.mean
        if self.sd is None or other.sd is None:
            return Spread(ratio)
        return Spread(ratio, ratio * math.hypot(self.sd / self.mean, other.sd / other.mean))

    def differs(self, other: Spread) -> bool | None:
        """Whether the two lie further apart than their spreads explain. None: there is no spread to judge by."""
        if self.sd is None or other.sd is None:
            return None
        return abs(self.mean - other.mean) > SPREADS * math.hypot(self.sd, other.sd)

    def text(self, digits: int = 2) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


ONE = Spread(1.0, 0.0)
"""The speedup of what is compared with itself."""


def to_record(values: Sequence[float]) -> dict[str, Any]:
    """Every value, with mean and deviation."""
    found = Spread.of(values)
    return {"mean": found and found.mean, "sd": found and found.sd, "values": list(values)}


def speedup_text(value: Spread) -> str:
    """Marked where it is not more than the spread."""
    return value.text() if value.differs(ONE) is not False else f"≈ {value.text()}"
