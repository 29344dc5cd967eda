"""Grammars of requests: a slow one is refused and delays no other request; the engine gets compiled ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Semaphore

import httpx
import pytest

from jetspec.grammar.compile_check import CompileChecker
from jetspec.grammar.constraint import Grammars
from jetspec.serve import compiler
from jetspec.serve.config import ServeConfig
from jetspec.types import Grammar
from tests.serve.live import NAME, Live, schema_format, tiny_llm, wait_until

KEYS = ("first-key-0123456789", "other-key-0123456789")


class Checks:
    """Replaces the check in another process: grammars of objects are too slow, others wait for `may_pass`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.may_pass = Semaphore(0)

    def __call__(self, checker: CompileChecker, grammar: Grammar, limit_s: float) -> None:
        self.started.append(json.loads(grammar.source)["type"])
        if self.started[-1] == "object":
            raise TimeoutError
        assert self.may_pass.acquire(timeout=60)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    checks = Checks()
    monkeypatch.setattr(CompileChecker, "check", lambda *args: checks(*args))
    return checks


@pytest.fixture
def server(folder: Path) -> Iterator[Live]:
    with Live(tiny_llm(folder), ServeConfig(port=0, keys=KEYS)) as server:
        yield server


def ask(server: Live, kind: str, key: str = KEYS[0]) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"response_format": schema_format({"type": kind})}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_slow_schema_is_tried_twice_then_refused_at_once(server: Live, checks: Checks) -> None:
    for _ in range(2):
        response = ask(server, "object")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert checks.started == ["object"] * 2
    checks.may_pass.release()
    assert ask(server, "boolean").status_code == 200


def test_request_that_waits_too_long_gets_503(server: Live, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled schema does not wait."""
    checks.may_pass.release()
    assert ask(server, "null").status_code == 200
    monkeypatch.setattr(compiler, "WAIT_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, server, "boolean")
        wait_until(lambda: checks.started == ["null", "boolean"])
        assert ask(server, "null").status_code == 200
        refused = ask(server, "integer")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "schemas_busy")
        assert int(refused.headers["Retry-After"]) == compiler.COMPILE_S
        checks.may_pass.release()
        assert slow.result().status_code == 200


def test_schemas_of_one_client_do_not_delay_another(server: Live, checks: Checks) -> None:
    """The current one may finish; then the other client comes first."""
    kinds = {"boolean": KEYS[0], "integer": KEYS[0], "number": KEYS[0], "string": KEYS[1]}

    def is_waiting(number: int) -> bool:
        return bool(checks.started) and len(server.server.compiler._lock._waiters) == number

    with ThreadPoolExecutor(len(kinds)) as pool:
        answers = []
        for number, (kind, key) in enumerate(kinds.items()):
            answers.append(pool.submit(ask, server, kind, key))
            wait_until(partial(is_waiting, number))
        checks.may_pass.release(len(kinds))
        assert {answer.result().status_code for answer in answers} == {200}
    assert checks.started == ["boolean", "string", "integer", "number"]


def test_engine_gets_compiled_grammars(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation for five completions, even if the cache keeps nothing."""
    monkeypatch.setattr("jetspec.grammar.constraint.CACHE_BYTES", 0)
    made: list[Grammar] = []
    compile = Grammars.compile

    def counted(self: Grammars, grammar: Grammar) -> object:
        made.append(grammar)
        return compile(self, grammar)

    monkeypatch.setattr(Grammars, "compile", counted)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server:
        done = server.chat(response_format=schema_format({"type": "boolean"}), n=5, max_tokens=4)
    assert done.status_code == 200 and len(made) == 1
