"""Two estimates differ seldom by chance, at any number of repeats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.estimate import Estimate, speedup_text

TRIALS = 1000


def named(values: Iterable[float], task: str = "a") -> dict[str, float]:
    """By questions of a task."""
    return {f"{task}-{i}": value for i, value in enumerate(values)}


def paired(draw: Callable[[], float], repeats: int) -> bool | None:
    found = Estimate.of_ratios([draw() / draw() for _ in range(repeats)])
    return found.differs_from_1() if found else None


def apart(draw: Callable[[], float], repeats: int) -> bool | None:
    a, b = (Estimate.of([draw() for _ in range(repeats)]) for _ in range(2))
    return a.differs(b) if a and b else None


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
@pytest.mark.parametrize("claim", [paired, apart])
def test_equal_methods_are_seldom_said_to_differ(claim: Callable[..., bool | None], repeats: int) -> None:
    rng = random.Random(repeats)
    claims = sum(bool(claim(lambda: rng.gauss(100, 5), repeats)) for _ in range(TRIALS))
    assert claims <= 0.02 * TRIALS


@pytest.mark.parametrize("times", [3, 2])
def test_twice_as_fast_here_and_half_as_fast_there_is_as_fast(times: int) -> None:
    """Also where one of the tasks lacks a repeat."""
    fast, slow = Estimate.of_ratios([2.0, 2.02, 1.98]), Estimate.of_ratios([0.495, 0.505, 0.5][:times])
    assert fast is not None and slow is not None
    both = Estimate.average([fast, slow])
    assert both.is_ratio and both.mean == pytest.approx(1, abs=1e-3) and both.differs_from_1() is False


@given(st.lists(st.lists(st.floats(0.1, 100), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_mean_over_tasks_varies_as_that_of_each_repeat(tasks: list[list[float]]) -> None:
    parts = [part for values in tasks if (part := Estimate.of(values))]
    repeats = [sum(column) / len(column) for column in zip(*tasks, strict=True)]
    found = Estimate.average(parts)
    expected = Estimate.of(repeats)
    assert expected and found.values == pytest.approx(repeats) and found.freedom == expected.freedom
    assert (found.mean, found.sd) == pytest.approx((expected.mean, expected.sd), abs=1e-9)
    torn = Estimate.average([*parts, Estimate(1.0, 0.5, 0.4, 1)])
    assert torn.sd == pytest.approx((sum(part.sd or 0 for part in parts) + 0.5) / (len(parts) + 1))
    assert torn.freedom == 1, "one that lacks repeats"


def test_questions_tell_how_far_others_might_have_moved_a_quotient() -> None:
    """The true value is within two standard errors in 95 % of the cases."""
    rng, hits = random.Random(0), 0
    for _ in range(1000):
        parts = [(rng.gauss(3, 0.5) * rounds, rounds) for rounds in rng.choices(range(20, 60), k=30)]
        found = Estimate.of_parts(parts)
        assert found is not None and found.sd is not None and found.freedom == 29
        hits += abs(found.mean - 3) < 2 * found.sd
    assert 920 <= hits <= 975
    assert Estimate.of_parts([(6, 2)]) == Estimate(3.0) and Estimate.of_parts([]) is None


@pytest.mark.parametrize(("value", "text"), [(0.0107, "0.011 ± 0.001"), (0.5, "0.50 ± 0.00"), (12.3, "12.30 ± 0.00")])
def test_small_numbers_say_something(value: float, text: str) -> None:
    assert Estimate(value, 0.001).text() == text


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_both_directions_are_marked_alike(ratios: list[float]) -> None:
    up, down = Estimate.of_ratios(ratios), Estimate.of_ratios([1 / ratio for ratio in ratios])
    assert up and down and speedup_text(up).startswith("≈") == speedup_text(down).startswith("≈")


def test_other_questions_may_move_a_speedup_further_than_repeats_do() -> None:
    """Repeats on an idle machine are nearly the same, while questions are not."""
    repeats = [1.2, 1.201, 1.199]
    alone = Estimate.of_ratios(repeats)
    alike = Estimate.of_ratios(repeats, named([1.19, 1.2, 1.21] * 4))
    apart = Estimate.of_ratios(repeats, named([0.6, 1.2, 2.4] * 4))
    assert alone and alike and apart and alike.questions and apart.questions
    assert [each.differs_from_1() for each in (alone, alike, apart)] == [True, True, False]
    assert alone.text() == alike.text() == apart.text(), "the spread is that over repeats"
    logs = [math.log(value) for value in [0.6, 1.2, 2.4] * 4]
    assert apart.questions.spread == pytest.approx(stats.sem(logs)) and apart.questions.freedom == 11
    faster = [1.3, 1.301, 1.299]
    better, exact = Estimate.of_ratios(faster, named([0.65, 1.3, 2.6] * 4, "others")), Estimate.of_ratios(faster)
    assert better and better.is_near(apart) and not better.differs(apart)
    assert exact and not exact.is_near(alone) and exact.differs(alone)
    assert Estimate.of_ratios(repeats, named([1.2])) == alone, "one question says nothing of others"


TASKS = ("sums", "code", "chat")


def two_methods(rng: random.Random, gain: float, plain_noise: float = 0.01) -> tuple[Estimate, Estimate]:
    """Speedups of two on the same few questions, which differ far more from each other than the methods do. Some have
    long answers, which count for more in a speedup."""
    found: tuple[list[Estimate], list[Estimate]] = [], []
    for task in TASKS:
        common, lengths = [rng.gauss(1.2, 0.3) for _ in range(6)], rng.choices((20, 256), k=6)
        plain = [rng.gauss(0, plain_noise) for _ in range(3)]
        for method, parts in enumerate(found):
            logs = [x + method * gain + rng.gauss(0, 0.06) for x in common]
            took = sum(length / math.exp(log) for length, log in zip(lengths, logs, strict=True))
            repeats = [sum(lengths) / took * math.exp(noise + rng.gauss(0, 0.01)) for noise in plain]
            part = Estimate.of_ratios(repeats, named(map(math.exp, logs), task))
            assert part is not None
            parts.append(part)
    return Estimate.average(found[0]), Estimate.average(found[1])


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 0.0, 0.02), (0.2, 0.9, 1.0)])
def test_methods_are_compared_question_by_question(gain: float, least: float, most: float) -> None:
    rng = random.Random(0)
    pairs = [two_methods(rng, gain) for _ in range(200)]
    claims = sum(bool(a.differs(b)) for a, b in pairs) / len(pairs)
    near = sum(b.is_near(a) for a, b in pairs) / len(pairs)
    assert least <= claims <= most and 0.9 - most <= near <= 1 - least
    a, b = pairs[0]
    assert a.is_near(b) == b.is_near(a)


def test_other_questions_are_not_paired() -> None:
    """The same gain on every question is certain; on others it may be theirs."""
    mine, its = [2.0, 4.0, 8.0, 3.0], [1.8, 3.6, 7.2, 2.7]
    a, b, c = (
        Estimate.of_ratios([each[0], 1.001 * each[0], 0.999 * each[0]], named(each, task))
        for each, task in ((mine, "a"), (its, "a"), (its, "b"))
    )
    assert a and b and c and a.differs(b) and not a.is_near(b)
    assert a.differs(c) is False and a.is_near(c)
