"""A schema that takes long to compile costs its sender an answer, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from jetspec.engine.llm import LLM
from jetspec.grammar import bounds
from jetspec.grammar.compile_check import CompileChecker
from jetspec.grammar.constraint import Grammars
from jetspec.serve import compiler
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError
from jetspec.types import Grammar
from tests.serve.live import NAME, Live, tiny_llm, wait_until
from tests.serve.test_forms import COUNTED, schema_format

SLOW, QUICK = Grammar("json_schema", json.dumps(COUNTED)), Grammar("json_schema", '{"type": "boolean"}')
SLOW_CALLS = Grammar("calls", json.dumps({"begin": "<", "end": ">", "schema": COUNTED}))
AMPLE_S = 30.0
"""More than anything quick takes, on a busy machine too."""


def children() -> set[BaseProcess]:
    """Processes of this one. Other tests may keep some, too."""
    return set(multiprocessing.active_children())


def copies(process: BaseProcess) -> str:
    """Processes of a process."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


@pytest.mark.parametrize("slow", [SLOW, SLOW_CALLS], ids=lambda grammar: grammar.kind)
def test_checker_ends_slow_compilation(alone: LLM, slow: Grammar) -> None:
    """And is ready for the next one, in the same process. What is slow here takes minutes."""
    others, checker = children(), CompileChecker(alone.grammars)
    try:
        checker.check(QUICK, AMPLE_S)
        (process,) = children() - others
        for _ in range(2):
            with pytest.raises(TimeoutError):
                checker.check(slow, 0.3)
            checker.check(QUICK, AMPLE_S)
        assert children() - others == {process} and copies(process) == ""
        with pytest.raises(ValueError, match="negative"):
            checker.check(Grammar("json_schema", '{"type": "string", "minLength": -1}'), AMPLE_S)
        checker.check(QUICK, AMPLE_S)
    finally:
        checker.stop()
    wait_until(lambda: not children() - others)
    with pytest.raises(ChildProcessError):
        checker.check(QUICK, AMPLE_S)


def test_processes_are_copies_of_one_that_is_ready(alone: LLM) -> None:
    """Not of this one, which has threads."""
    others, parents = children(), []
    for _ in range(2):
        checker = CompileChecker(alone.grammars)
        try:
            checker.check(QUICK, AMPLE_S)
            (process,) = children() - others
            status = Path(f"/proc/{process.pid}/status").read_text()
            parents.append(int(status.split("PPid:")[1].split()[0]))
        finally:
            checker.stop()
        wait_until(lambda: not children() - others)
    assert parents[0] == parents[1] != os.getpid()


def test_a_stop_does_not_wait_for_a_grammar(alone: LLM) -> None:
    checker = CompileChecker(alone.grammars)
    checker.check(QUICK, AMPLE_S)
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(checker.check, SLOW, 2 * AMPLE_S)
        wait_until(lambda: any(map(copies, children())))
        (process,) = [child for child in children() if copies(child)]
        copy = Path(f"/proc/{copies(process).strip()}")
        checker.stop()
        with pytest.raises(ChildProcessError):
            trying.result(timeout=AMPLE_S)
    wait_until(lambda: not copy.exists())


def counted(number: int) -> dict[str, Any]:
    """Schemas that all take minutes."""
    return COUNTED | {"properties": {f"q{number}p{i}": {"type": "string"} for i in range(400)}}


def test_a_slow_schema_does_not_disable_those_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = children()
    monkeypatch.setattr(compiler, "COMPILE_S", 1.0)
    monkeypatch.setattr(bounds, "MAX_STATES", 1 << 30)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, ThreadPoolExecutor(1) as pool:

        def ask(schema: dict[str, Any]) -> httpx.Response:
            return server.chat(response_format=schema_format(schema), max_tokens=4)

        assert ask({"type": "null"}).status_code == 200
        slow = pool.submit(ask, COUNTED)
        assert ask({"type": "boolean"}).status_code == 200
        assert slow.result().status_code == 400
        assert "longer than 1 s" in slow.result().json()["error"]["message"]
        monkeypatch.setattr(compiler, "COMPILE_S", AMPLE_S)
        began = time.monotonic()
        assert ask(COUNTED).status_code == 400 and time.monotonic() - began < AMPLE_S, "it is remembered"
    wait_until(lambda: not children() - others)


def test_who_waits_too_long_for_the_schemas_of_others_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled already does not wait."""
    runs, may_end = Event(), Event()

    def held(checker: CompileChecker, grammar: Grammar, limit_s: float) -> None:
        runs.set()
        assert may_end.wait(AMPLE_S)

    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, ThreadPoolExecutor(1) as pool:

        def ask(kind: str) -> httpx.Response:
            return server.chat(response_format=schema_format({"type": kind}), max_tokens=4)

        assert ask("null").status_code == 200
        monkeypatch.setattr(CompileChecker, "check", held)
        monkeypatch.setattr(compiler, "WAIT_S", 0.1)
        slow = pool.submit(ask, "boolean")
        try:
            assert runs.wait(AMPLE_S) and ask("null").status_code == 200
            refused = ask("integer")
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) == compiler.COMPILE_S
        finally:
            may_end.set()
        assert slow.result().status_code == 200


def test_many_slow_schemas_of_one_client_keep_back_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_S", 1.0)
    monkeypatch.setattr(bounds, "MAX_STATES", 1 << 30)
    keys = ("first-key-0123456789", "other-key-0123456789")
    with Live(tiny_llm(folder), ServeConfig(port=0, keys=keys)) as server, ThreadPoolExecutor(6) as pool:

        def ask(schema: dict[str, Any], key: str) -> int:
            asked = {"messages": [{"role": "user", "content": "hi"}], "response_format": schema_format(schema)}
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": NAME, "max_tokens": 4, **asked}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

        assert ask({"type": "null"}, keys[1]) == 200
        slow = [pool.submit(ask, counted(number), keys[0]) for number in range(6)]
        time.sleep(1.2)
        for kind, key in (("boolean", keys[1]), ("integer", keys[0])):
            before = sum(answer.done() for answer in slow)
            assert ask({"type": kind}, key) == 200
            waited = sum(answer.done() for answer in slow) - before
            assert waited <= 2, "it waits for one that takes long at most; another may just have ended"
        assert not all(answer.done() for answer in slow)
        assert {answer.result() for answer in slow} == {400}


def test_turns_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of arrival, but what is slow later, and those that have used much last.

    Who waits too long or leaves is passed over.
    """

    async def run() -> list[str]:
        turns, done, may_end = compiler.FairLock(), [], asyncio.Event()

        async def take(client: str, name: str) -> None:
            async with turns.hold(client, is_slow="slow" in name):
                await may_end.wait()
                turns.charge(client, AMPLE_S if client == "a" else 0.0)
                done.append(name)

        async def start(*args: str) -> asyncio.Task[None]:
            task = asyncio.create_task(take(*args))
            await asyncio.sleep(0)
            return task

        names = [("a", "a1"), ("a", "a2"), ("b", "b1 slow"), ("c", "c1"), ("b", "b2"), ("a", "a3")]
        tasks = [await start(*given) for given in names]
        tasks[3].cancel()
        monkeypatch.setattr(compiler, "WAIT_S", 0.1)
        with pytest.raises(ApiError) as why:
            await take("a", "a4")
        num_ahead = len(["a2", "b2", "a3"])
        assert why.value.retry_after == (1 + num_ahead) * compiler.COMPILE_S
        may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take("d", "d1")
        return done

    assert asyncio.run(run()) == ["a1", "b2", "b1 slow", "a2", "a3", "d1"]


def test_the_engine_takes_what_was_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread nothing is compiled and no schema read, however small the memory for those before."""
    monkeypatch.setattr("jetspec.grammar.constraint.CACHE_BYTES", 0)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server:
        made: list[Grammar] = []
        compile = Grammars.compile

        def count(self: Grammars, grammar: Grammar) -> object:
            made.append(grammar)
            return compile(self, grammar)

        monkeypatch.setattr(Grammars, "compile", count)
        done = server.chat(response_format=schema_format({"type": "boolean"}), n=5, max_tokens=4)
        assert done.status_code == 200 and len(made) == 1
