"""Graders of answers: mathematics by equality of expressions, programs by running tests.

A question is a line of a task's file. Programs are graded by the tests that it carries: `test` and `entry_point` as
OpenAI's HumanEval has them, or the asserts in the prompt of MBPP. A HumanEval line without tests is graded on the calls
in its docstring, where the reference solution says what is right; that is fewer tests than the original has.
"""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.sandbox import run_tests
from jetspec.files import missing_package

MATH_TASKS = ("gsm8k", "math500", "aime24", "aime25")
NEEDS_MATH_VERIFY = str(missing_package("math-verify", "bench", "grading mathematics"))
MATH_TIMEOUT_S = 5
"""Limit for one expression; the library can take very long."""
TWO_NUMBERS = re.compile(r"\d\s+\d")
"""Numbers separated by a space; the library would add them."""
SHORT_FRACTION = re.compile(r"\\[cdt]?frac\s*(\\[a-zA-Z]+|[0-9a-zA-Z])\s*(\\[a-zA-Z]+|[0-9a-zA-Z])")
"""Fraction without braces: TeX takes the next two signs."""
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
MBPP_TESTS = "Your code should pass these tests:\n"


@dataclass(frozen=True)
class Grade:
    correct: bool | None = None
    """None: the question has no grader."""
    is_partial: bool = False
    """Fewer tests were run than the task is known for, so scores are higher than published ones."""


def grade(task: str, question: Mapping[str, Any], answer: str) -> Grade:
    """Grade an answer to a question of a task. `answer` is the text of the last turn."""
    if task in MATH_TASKS:
        expected = question.get("answer")
        return Grade() if expected is None else Grade(_is_right(str(expected), answer))
    with suppress(SyntaxError):  # of the question's own code
        if task == "humaneval":
            return _grade_humaneval(question, answer)
        if task == "mbpp":
            return _grade_mbpp(question, answer)
    return Grade()


def _is_right(expected: str, answer: str) -> bool:
    """Grade mathematics by the last box; in a text without one, by the answer that the library finds."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ValueError(NEEDS_MATH_VERIFY) from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # parse errors are wrong answers
    # The library's timeout needs an alarm signal, and so the main thread.
    timeout = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    found = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", last_boxed(answer))
    texts = f"\\boxed{{{expected}}}", f"\\boxed{{{found}}}" if found else answer
    wanted, values = (list(parse(text, parsing_timeout=timeout)) for text in texts)
    found = found or next((value for value in reversed(values) if isinstance(value, str)), "")
    if not found or _same_text(expected, found):
        return bool(found)
    return not TWO_NUMBERS.search(found) and bool(verify(wanted, values, timeout_seconds=timeout))


def last_boxed(text: str) -> str:
    """Contents of the last box that is closed; none where there is no box."""
    for match in reversed(list(re.finditer(r"boxed\s*\{", text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end].strip()
    return ""


def _same_text(a: str, b: str) -> bool:
    """Equality up to typesetting. A space between two words or numbers counts: 1 2 is not 12."""

    def bare(text: str) -> str:
        text = re.sub(r"\\(?:left|right|!|,)", "", text)
        text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\[;\s]|[\s$]", " ", text)
        return re.sub(r"(?<!\w) +| +(?!\w)", "", re.sub(" +", " ", text)).rstrip(".")

    return bare(a) == bare(b)


def _grade_mbpp(question: Mapping[str, Any], answer: str) -> Grade:
    _, found, tests = str(question["turns"][0]).partition(MBPP_TESTS)
    if not found:
        return Grade()
    code = find_code(answer, lambda name: re.search(rf"\b{re.escape(name)}\b", tests) is not None)
    return Grade(run_tests(code, [ast.unparse(statement) for statement in ast.parse(tests).body]).passed)


def _grade_humaneval(question: Mapping[str, Any], answer: str) -> Grade:
    prompt = "".join(find_blocks(str(question["turns"][0]))[:1])
    functions = [node for node in ast.parse(prompt).body if isinstance(node, ast.FunctionDef)]
    if not functions:
        return Grade()
    name = question.get("entry_point") or functions[-1].name
    code = find_code(answer, name.__eq__)
    # Code without the function is its body, behind the prompt.
    program = f"{prompt}\n{code}" if name in defined_names(code) else prompt + code
    if question.get("test"):
        return Grade(run_tests(program, [question["test"], f"check({name})"]).passed)
    calls = dict.fromkeys(_literal_calls(name, ast.get_docstring(functions[-1]) or ""))
    if not calls:
        return Grade()
    setup = f"{EXPECTED}\nexpected = Expected({prompt + str(question.get('answer', ''))!r})"
    checks = (f"expected.check({name!r}, {call!r})" for call in calls)
    return Grade(run_tests(program, [setup, *checks]).passed, is_partial=True)


EXPECTED = '''
class Expected:
    """Values of the reference solution."""

    def __init__(self, source):
        self.names = {}
        exec(source, self.names)

    def check(self, name, arguments):
        given, wanted = (eval(f"{name}({arguments})", names) for names in (globals(), self.names))
        assert self.same(given, wanted), f"{name}({arguments}) is {given!r:.80}, not {wanted!r:.80}"

    def same(self, a, b):
        if isinstance(a, float) and isinstance(b, (int, float)):
            return abs(a - b) <= 1e-6 * max(1, abs(b))
        if isinstance(a, (list, tuple)) and type(a) is type(b):
            return len(a) == len(b) and all(map(self.same, a, b))
        return a == b
'''
"""Test of a call in the docstring with literal arguments: program and reference agree, floats up to rounding."""


def _literal_calls(name: str, docstring: str) -> list[str]:
    """Literal arguments of every call of a function in a text. `f()` is only its name."""
    found = []
    for match in re.finditer(rf"\b{re.escape(name)}\(", docstring):
        rest = docstring[match.end() :]
        for end in (m.start() for m in re.finditer(r"\)", rest)):
            try:
                call = ast.parse(f"f({rest[:end]})", mode="eval").body
                assert isinstance(call, ast.Call) and rest[:end].strip()
                [ast.literal_eval(argument) for argument in (*call.args, *(k.value for k in call.keywords))]
            except (SyntaxError, ValueError, AssertionError):
                continue
            found.append(" ".join(rest[:end].split()))
            break
    return found


def find_code(answer: str, is_wanted: Callable[[str], bool]) -> str:
    """The first block of an answer that defines a wanted name; else its first block, else all of it."""
    blocks = find_blocks(answer)
    wanted = (block for block in blocks if any(map(is_wanted, defined_names(block))))
    return next(wanted, blocks[0] if blocks else answer)


def find_blocks(text: str) -> list[str]:
    """Text between fences. The last fence may be missing where an answer was cut off."""
    return [block for block in FENCE.findall(text) if block.strip()]


def defined_names(code: str) -> set[str]:
    """Functions and classes of code, by a pattern, since it may have syntax errors."""
    return set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE))
