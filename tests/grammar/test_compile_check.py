"""The child process that compiles grammars first: it ends slow ones, stays usable, and stops at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from jetspec.grammar.compile_check import CompileChecker
from jetspec.grammar.constraint import Grammars
from jetspec.types import Grammar
from tests.train.tiny_model import END_TOKEN, byte_tokenizer

COUNTED = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(400)},
    "minProperties": 200,
    "maxProperties": 300,
    "additionalProperties": False,
}
"""Takes xgrammar minutes."""
SLOW, QUICK = Grammar("json_schema", json.dumps(COUNTED)), Grammar("json_schema", '{"type": "boolean"}')
SLOW_CALLS = Grammar("calls", json.dumps({"begin": "<", "end": ">", "schema": COUNTED}))
AMPLE_S = 60.0
"""More than anything quick takes on a busy machine."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer().token_bytes(), END_TOKEN + 1, frozenset({END_TOKEN}))


@pytest.fixture
def checker(grammars: Grammars) -> Iterator[CompileChecker]:
    others, checker = children(), CompileChecker(grammars)
    yield checker
    checker.stop()
    wait_until(lambda: not children() - others)
    with pytest.raises(ChildProcessError):
        checker.check(QUICK, AMPLE_S)


def children() -> set[BaseProcess]:
    return set(multiprocessing.active_children())


def forks(process: BaseProcess) -> str:
    """Process ids of the forks."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + AMPLE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("slow", [SLOW, SLOW_CALLS], ids=lambda grammar: grammar.kind)
def test_slow_grammar_is_ended_and_process_stays_usable(checker: CompileChecker, slow: Grammar) -> None:
    others = children()
    checker.check(QUICK, AMPLE_S)
    (process,) = children() - others
    for _ in range(2):
        with pytest.raises(TimeoutError):
            checker.check(slow, 0.3)
        checker.check(QUICK, AMPLE_S)
    with pytest.raises(ValueError, match="minLength"):
        checker.check(Grammar("json_schema", '{"type": "string", "minLength": -1}'), AMPLE_S)
    checker.check(QUICK, AMPLE_S)
    assert children() - others == {process} and forks(process) == ""


def test_processes_are_forks_of_the_fork_server(grammars: Grammars) -> None:
    others, parents = children(), []
    for _ in range(2):
        checker = CompileChecker(grammars)
        try:
            checker.check(QUICK, AMPLE_S)
            (process,) = children() - others
            status = Path(f"/proc/{process.pid}/status").read_text()
            parents.append(int(status.split("PPid:")[1].split()[0]))
        finally:
            checker.stop()
        wait_until(lambda: not children() - others)
    assert parents[0] == parents[1] != os.getpid()


def test_stop_does_not_wait_for_a_grammar(checker: CompileChecker) -> None:
    checker.check(QUICK, AMPLE_S)
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(checker.check, SLOW, 2 * AMPLE_S)
        wait_until(lambda: any(map(forks, children())))
        (process,) = [child for child in children() if forks(child)]
        fork = Path(f"/proc/{forks(process).strip()}")
        checker.stop()
        with pytest.raises(ChildProcessError):
            checking.result(timeout=AMPLE_S)
    wait_until(lambda: not fork.exists())
