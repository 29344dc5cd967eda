"""Grading: the forms in which right answers are written count as right, and nothing else does."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from benchmarks.grade import Grade, grade

HUMANEVAL = '''Write a solution to the following problem and make sure that it passes the tests:
```python
from typing import List

def shift(x: int) -> int:
    return x + 100

def largest(numbers: List[float], least: float = 0) -> float:
    """ The largest number. `largest()` of none is `least`.
    >>> largest([1.0, 3.5])
    3.5
    largest([], 2) ➞ 2
    largest(numbers, 2) is no example
    """

```'''
REFERENCE = "    return max([least, *numbers])\n"
MBPP = "Write it.\nYour code should pass these tests:\nassert double(2) == 4\nassert double('a') == \\\n 'aa'"


def math(expected: str, answer: str) -> Grade:
    return grade("math500", {"answer": expected}, answer)


RIGHT = [
    ("18", r"So it is $\boxed{18}$."),
    ("18", r"\boxed{18 \text{ dollars}}"),
    ("18", "She makes 9 * 2 = $18.00 every day."),
    ("1080", "That is 1,080 in all."),
    ("2", "x = 7-5"),
    (r"\frac{3}{4}", r"The answer is $\frac{3}{4}$."),
    ("11", "She pays $5 and he pays $6, together 11 dollars."),
    ("70000", "A profit of $200,000 - $130,000 = $70,000."),
    ("18", "The answer is 18. It took 3 steps."),
    ("2 1/2", r"\boxed{2  1/2}"),
    ("10,000", r"\boxed{10{,}000}"),
    ("10,\\!000", r"\boxed{10000}"),
    (r"\text{the even ones}", r"\boxed{the  even ones}"),
    ("18", r"It is 18, so \boxed{"),
    (r"\frac{14}{3}", r"\boxed{14/3}"),
    ("p - q", r"\boxed{-q + p}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \frac{\pi}{2})}"),
    ("x=5", r"\boxed{5}"),
    (r"\frac{1}{2}", r"\boxed{\frac 1 2}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    (r"\frac{1}{2}", r"\boxed{\cfrac 1 2}"),
    (r"\frac{\pi}{2}", r"\boxed{\frac \pi 2}"),
]
WRONG = [
    ("18", r"18? No: \boxed{17}"),
    ("18", ""),
    ("2", r"\boxed{2^{2^{2^{2}}}}"),
    ("p - q", "p - r"),
    ("2", r"So it is $11\sqrt{2}$."),
    ("5", "x = 7-5"),
    ("12", r"\boxed{1 2}"),
    ("3", r"\boxed{1 2}"),
]


@pytest.mark.parametrize(
    ("expected", "answer", "correct"), [*((*case, True) for case in RIGHT), *((*case, False) for case in WRONG)]
)
def test_mathematics_in_many_forms(expected: str, answer: str, correct: bool) -> None:
    assert math(expected, answer).correct is correct


def test_mathematics_is_graded_in_any_thread() -> None:
    grades: list[Grade] = []
    thread = threading.Thread(target=lambda: grades.append(math(r"\frac{1}{2}", r"\boxed{0.5}")))
    thread.start()
    thread.join()
    assert grades[0].correct


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="math-verify"):
        math("p - q", r"\boxed{-q + p}")


def humaneval(answer: str, **more: Any) -> bool | None:
    return grade("humaneval", {"turns": [HUMANEVAL], "answer": REFERENCE, **more}, answer).correct


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        (f"```python\n{REFERENCE}```", True),
        ("Here:\n```python\ndef largest(numbers, least=0):\n    return max([least] + numbers)\n```\nIt works.", True),
        ("```\ndef largest(numbers: List[float], least=0):\n    return shift(max([least] + numbers)) - 100\n```", True),
        ("```python\nprint('first')\n```\n```python\ndef largest(n, l=0): return max([l, *n])\n```", True),
        ("```python\ndef largest(n, l=0): return max([l, *n]) + 1e-12", True),
        ("def largest(n, l=0): return max([l, *n])", True),
        ("", False),
        ("I cannot.", False),
        ("```python\ndef largest(n, l=0): return 3.5\n```", False),
        ("```python\n```", False),
    ],
)
def test_programs_are_found_wherever_they_stand(answer: str, correct: bool) -> None:
    assert humaneval(answer) is correct


def test_tests_of_the_question_go_before_its_docstring() -> None:
    always = "```python\ndef largest(n, l=0): return 3.5\n```"
    test = "def check(candidate):\n    assert candidate([]) == 3.5"
    assert humaneval(always, test=test, entry_point="largest")
    assert humaneval(f"```python\n{REFERENCE}```", test=test, entry_point="largest") is False


def test_a_grade_by_the_docstring_alone_says_so() -> None:
    question = {"turns": [HUMANEVAL], "answer": REFERENCE}
    by_test = {**question, "test": "def check(candidate): pass", "entry_point": "largest"}
    assert grade("humaneval", question, REFERENCE).is_partial
    assert not grade("humaneval", by_test, REFERENCE).is_partial
    assert not grade("mbpp", {"turns": [MBPP]}, "").is_partial and not math("1", "1").is_partial


@pytest.mark.parametrize("prompt", ["Write it.", "```python\nx = 1\n```", "```python\ndef broken(:\n```"])
def test_a_question_that_cannot_be_read_has_no_grade(prompt: str) -> None:
    assert grade("humaneval", {"turns": [prompt], "answer": ""}, "```python\nx = 1\n```").correct is None


def test_mbpp_runs_the_tests_of_the_prompt() -> None:
    question = {"turns": [MBPP]}
    assert grade("mbpp", question, "```python\ndef double(x):\n    return x * 2\n```").correct
    assert grade("mbpp", question, "```python\ndef double(x):\n    return x + 2\n```").correct is False
    assert grade("mbpp", question, "```python\nimport os\nos._exit(0)\n```").correct is False
    assert grade("mbpp", {"turns": ["Write it."]}, "").correct is None
    assert grade("mbpp", {"turns": [f"{MBPP}\nassert ("]}, "").correct is None
