"""Weights of the choice model of draft heads (`types.ChoiceModel`), fitted per sampling setting and depth.

They are stored in the head's folder as choices.json; heads without them use those of the shipped head. Drafts depend on
them, texts never do.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jetspec.models.hub import DEFAULT_MODEL, shipped_head
from jetspec.types import SamplingParams

CHOICES_FILE = "choices.json"


class Weights(NamedTuple):
    """Weights of one depth."""

    temperature: float
    noise: float
    kept: float = 0.0
    """Bonus of the logits that the filters keep."""


@dataclass(frozen=True)
class Fit:
    """Weights fitted for one sampling setting."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    depths: tuple[Weights, ...] = ()
    """From depth 1 on; deeper ones are like the last."""
    observations: int = 0
    """Choices of the target at depth 1 that they were fitted to."""

    def __post_init__(self) -> None:
        if not self.depths:
            raise ValueError(f"the fit for temperature {self.temperature} has no depths")
        for weights in self.depths:
            if not (weights.temperature > 0 and all(map(math.isfinite, weights))):
                raise ValueError(f"{list(weights)} are no weights: they are finite, and the temperature is above 0")

    @property
    def filters(self) -> tuple[float, int, float]:
        return self.top_p, self.top_k, self.min_p

    def at(self, depth: int) -> Weights:
        return self.depths[min(depth, len(self.depths)) - 1]


@dataclass(frozen=True)
class ChoiceFits:
    """Fits of a head. Without any, sampled requests are drafted at their own temperature, without noise."""

    fits: tuple[Fit, ...] = field(default=())

    def weights(self, sampling: SamplingParams, greedy_temperature: float, depth: int) -> list[Weights]:
        """Weights of depths 1 to `depth`: those of the fits with the most similar filters, interpolated between their
        temperatures. Temperature 0 is the greedy draft."""
        if not sampling.is_sampled:
            return [Weights(greedy_temperature, 0.0)] * depth
        if not self.fits:
            return [Weights(sampling.temperature, 0.0)] * depth
        nearest = min({fit.filters for fit in self.fits}, key=lambda filters: (_distance(filters, sampling), filters))
        known = sorted((fit for fit in self.fits if fit.filters == nearest), key=lambda fit: fit.temperature)
        greedy = Fit(0.0, depths=(Weights(greedy_temperature, 0.0),))
        points = [greedy, *known]
        after = next((i for i, fit in enumerate(points) if fit.temperature >= sampling.temperature), len(points) - 1)
        low, high = list(pairwise(points))[max(after, 1) - 1]
        share = min(1.0, (sampling.temperature - low.temperature) / (high.temperature - low.temperature))
        return [_between(low.at(d), high.at(d), share) for d in range(1, depth + 1)]

    @staticmethod
    def read(folder: Path) -> ChoiceFits:
        """Reads the fits in a head's folder, else those of the shipped head. Empty if there are none."""
        path = folder / CHOICES_FILE
        if not path.is_file():
            return _shipped()
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["fits"]
            fits = (Fit(**{**row, "depths": tuple(Weights(*map(float, d)) for d in row["depths"])}) for row in rows)
            return ChoiceFits(tuple(fits))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error

    def write(self, folder: Path) -> None:
        path = folder / CHOICES_FILE
        rows = [{**asdict(fit), "depths": [[round(x, 4) for x in d] for d in fit.depths]} for fit in self.fits]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        path.write_text(f'{{"fits": [\n{lines}\n]}}\n', encoding="utf-8")


@cache
def _shipped() -> ChoiceFits:
    folder = shipped_head(DEFAULT_MODEL)
    return ChoiceFits.read(folder) if folder and (folder / CHOICES_FILE).is_file() else ChoiceFits()


def _distance(filters: tuple[float, int, float], sampling: SamplingParams) -> float:
    top_p, top_k, min_p = filters
    same_kind = bool(top_k) == bool(sampling.top_k)
    return abs(top_p - sampling.top_p) + abs(min_p - sampling.min_p) + (0 if same_kind else 0.1)


def _between(low: Weights, high: Weights, share: float) -> Weights:
    return Weights(*(a + share * (b - a) for a, b in zip(low, high, strict=True)))
