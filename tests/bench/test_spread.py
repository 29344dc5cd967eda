"""When two numbers differ: seldom where they do not, whatever the number of repeats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jetspec.bench.spread import Spread, speedup_text, student

TRIALS = 3000


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 11, 14.5, 30, 1000, math.inf])
def test_student_is_right_once_in_a_hundred(freedom: float) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.995, freedom), rel=5e-3)
    assert student(max(freedom - 0.5, 1)) >= student(freedom), "part of a degree is no more than none"


def paired(draw: Callable[[], float], repeats: int) -> bool | None:
    found = Spread.of_ratios([draw() / draw() for _ in range(repeats)])
    return found.differs_from_1() if found else None


def apart(draw: Callable[[], float], repeats: int) -> bool | None:
    a, b = (Spread.of([draw() for _ in range(repeats)]) for _ in range(2))
    return a.differs(b) if a and b else None


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
@pytest.mark.parametrize("claim", [paired, apart])
def test_equal_methods_are_seldom_said_to_differ(claim: Callable[..., bool | None], repeats: int) -> None:
    rng = random.Random(repeats)
    claims = sum(bool(claim(lambda: rng.gauss(100, 5), repeats)) for _ in range(TRIALS))
    assert claims <= 0.02 * TRIALS


def test_what_is_clearly_faster_is_said_to_be_so() -> None:
    rng = random.Random(0)
    ratios = [[1.5 * rng.gauss(1, 0.01) / rng.gauss(1, 0.01) for _ in range(3)] for _ in range(300)]
    found = [spread for values in ratios if (spread := Spread.of_ratios(values))]
    assert sum(bool(spread.differs_from_1()) for spread in found) > 290


def test_many_tasks_know_more_than_one() -> None:
    one = Spread.of_ratios([1.03, 1.05, 1.04])
    assert one is not None
    many = Spread.average([one] * 6)
    assert many.freedom == pytest.approx(6 * one.freedom) and many.error < one.error and many.mean == one.mean


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_both_directions_are_marked_alike(ratios: list[float]) -> None:
    up, down = Spread.of_ratios(ratios), Spread.of_ratios([1 / ratio for ratio in ratios])
    assert up and down and speedup_text(up).startswith("≈") == speedup_text(down).startswith("≈")


def test_values_that_never_vary_differ_when_they_are_not_equal() -> None:
    a, b = Spread.of([3.0, 3.0, 3.0]), Spread.of([3.1, 3.1, 3.1])
    assert a and b and a.differs(b) and a.differs(a) is False
