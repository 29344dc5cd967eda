"""Lint of the prose in docstrings and comments: plain openings, the field's vocabulary, no personification."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jetspec", "jetspec_vllm", "benchmarks", "tests")
OPENING = re.compile(r"(What|Who|Whose|How|Whether|Where|That|As|Nobody|Somebody|Something)\b")
OLD_NAMES = re.compile(
    r"\b(Lineup|Wants|Ticket|Desk|Lesson|heat_B|heat|twin|patience|Shrink|moves?|moved|moving|Invent\w*)\b"
)
"""Names of the project's former vocabulary. `move` is `copy` or `shift` of tensors."""
PERSONS = re.compile(
    r"\b((?<!`)nobody|somebody|whoever|everybody|anybody|"
    r"(code|kernel|engine|scheduler|drafter|head|server|program|function|class)s? "
    r"(wants?|knows?|hopes?|believes?|likes?)"
    r"|find(s)? (no )?room|polite(ly)?)\b",
    re.IGNORECASE,
)
ALIASES = "aliases.py"
"""The table of former names, which has to spell them."""


def sources(packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    return [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def docstrings(file: Path) -> list[tuple[int, str]]:
    """Line and text of every docstring, strings below attributes included."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                found.append((item.lineno, item.value.value))
    return found


@functools.cache
def prose(file: Path) -> list[tuple[int, str]]:
    """Line and text of every docstring and comment."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
    return [*docstrings(file), *((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)]


def found(pattern: re.Pattern[str], texts: Iterable[tuple[int, str]], file: Path) -> list[str]:
    place = file.relative_to(ROOT)
    return [f"{place}:{line}: {match[0]}" for line, text in texts for match in pattern.finditer(text)]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_with_a_subject_or_a_verb(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for file in sources((package,))
        for line, text in docstrings(file)
        if OPENING.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


def test_prose_uses_the_vocabulary_of_the_field() -> None:
    files = [file for file in sources(PACKAGES[:-1]) if file.name != ALIASES]
    wrong = [line for file in files for line in found(OLD_NAMES, prose(file), file)]
    assert not wrong, "\n".join(wrong)


def test_code_is_not_personified() -> None:
    files = [file for file in sources() if file != Path(__file__)]
    wrong = [line for file in files for line in found(PERSONS, prose(file), file)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [("What a head drafts.", True), ("Tokens of the path.", False), ("Assigns rows.", False), ("As before.", True)],
)
def test_openings_are_whole_words(text: str, is_wrong: bool) -> None:
    assert bool(OPENING.match(text)) == is_wrong
