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
from typing import Any

import httpx
import pytest

from jetspec.engine.constraint import Grammars
from jetspec.engine.llm import LLM
from jetspec.engine.trial import Trial
from jetspec.serve import compiler, schema
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import Refused
from jetspec.types import Grammar
from tests.clock import slowness
from tests.serve.live import NAME, Live, tiny_llm, wait_until
from tests.serve.test_forms import COUNTED, schema_format

SLOW, QUICK = Grammar("json_schema", json.dumps(COUNTED)), Grammar("json_schema", '{"type": "boolean"}')
SLOW_CALLS = Grammar("calls", json.dumps({"begin": "<", "end": ">", "schema": COUNTED}))


def children() -> set[BaseProcess]:
    """Processes of this one. Other tests may keep some, too."""
    return set(multiprocessing.active_children())


def copies(process: BaseProcess) -> str:
    """Processes of a process."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


@pytest.mark.parametrize("slow", [SLOW, SLOW_CALLS], ids=lambda grammar: grammar.kind)
def test_a_trial_ends_what_takes_too_long(alone: LLM, slow: Grammar) -> None:
    """And is ready for the next one at once."""
    others, trial, unit = children(), Trial(alone.grammars), 0.5 * slowness()
    try:
        trial.run(QUICK, unit)
        (process,) = children() - others
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                trial.run(slow, unit)
            trial.run(QUICK, unit)
            assert time.monotonic() - began < 3 * unit
        assert children() - others == {process} and copies(process) == ""
        with pytest.raises(ValueError, match="negative"):
            trial.run(Grammar("json_schema", '{"type": "string", "minLength": -1}'), unit)
        trial.run(QUICK, unit)
    finally:
        trial.stop()
    wait_until(lambda: not children() - others)
    with pytest.raises(ChildProcessError):
        trial.run(QUICK, unit)


def test_processes_are_copies_of_one_that_is_ready(alone: LLM) -> None:
    """Not of this one, which has threads."""
    others, parents = children(), []
    for _ in range(2):
        trial = Trial(alone.grammars)
        try:
            trial.run(QUICK, 5)
            (process,) = children() - others
            status = Path(f"/proc/{process.pid}/status").read_text()
            parents.append(int(status.split("PPid:")[1].split()[0]))
        finally:
            trial.stop()
        wait_until(lambda: not children() - others)
    assert parents[0] == parents[1] != os.getpid()


def test_a_stop_does_not_wait_for_a_grammar(alone: LLM) -> None:
    trial = Trial(alone.grammars)
    trial.run(QUICK, 0.5)
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(trial.run, SLOW, 30.0)
        time.sleep(0.3)
        (process,) = [child for child in children() if copies(child)]
        copy = Path(f"/proc/{copies(process).strip()}")
        trial.stop()
        with pytest.raises(ChildProcessError):
            trying.result(timeout=5)
    wait_until(lambda: not copy.exists())


def counted(number: int) -> dict[str, Any]:
    """Schemas that all take minutes."""
    return COUNTED | {"properties": {f"q{number}p{i}": {"type": "string"} for i in range(400)}}


def test_a_slow_schema_does_not_disable_those_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = children()
    monkeypatch.setattr(compiler, "COMPILE_S", 1.0)
    monkeypatch.setattr(schema, "MAX_STATES", 1 << 30)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, ThreadPoolExecutor(2) as pool:

        def ask(schema: dict[str, Any]) -> httpx.Response:
            return server.chat(response_format=schema_format(schema), max_tokens=4)

        assert ask({"type": "null"}).status_code == 200
        slow = pool.submit(ask, COUNTED)
        time.sleep(0.3)
        known = pool.submit(ask, {"type": "null"})
        assert known.result().status_code == 200 and not slow.done(), "what is compiled already does not wait"
        other = ask({"type": "boolean"})
        assert (slow.result().status_code, other.status_code) == (400, 200)
        assert "longer than 1 s" in slow.result().json()["error"]["message"]

        monkeypatch.setattr(compiler, "COMPILE_S", 30.0)
        began = time.monotonic()
        assert ask(COUNTED).status_code == 400 and time.monotonic() - began < 30, "it is remembered"
        monkeypatch.setattr(compiler, "COMPILE_S", 1.0)

        monkeypatch.setattr(compiler, "WAIT_S", 0.1)
        slow = pool.submit(ask, counted(1))
        time.sleep(0.3)
        refused = ask({"type": "integer"})
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) == 1
        assert slow.result().status_code == 400
    wait_until(lambda: not children() - others)


def test_many_slow_schemas_of_one_client_keep_back_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_S", 1.0)
    monkeypatch.setattr(schema, "MAX_STATES", 1 << 30)
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
    monkeypatch.setattr(compiler, "WAIT_S", 0.5)

    async def run() -> list[str]:
        turns, done = compiler.Turns(), []

        async def take(client: str, name: str, seconds: float) -> None:
            async with turns.of(client, is_slow="slow" in name):
                await asyncio.sleep(seconds)
                turns.charge(client, seconds)
                done.append(name)

        async def start(*args: Any) -> asyncio.Task[None]:
            task = asyncio.create_task(take(*args))
            await asyncio.sleep(0)
            return task

        names = [
            ("a", "a1", 0.2),
            ("a", "a2", 0.2),
            ("b", "b1 slow", 0.0),
            ("c", "c1", 0.0),
            ("b", "b2", 0.0),
            ("a", "a3", 0.5),
        ]
        tasks = [await start(*given) for given in names]
        tasks[3].cancel()
        late = await start("a", "a4", 0.0)
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(Refused) as why:
            await late
        assert why.value.retry_after == compiler.COMPILE_S
        await take("d", "d1", 0.0)
        return done

    assert asyncio.run(run()) == ["a1", "b2", "b1 slow", "a2", "a3", "d1"]


def test_the_engine_takes_what_was_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread nothing is compiled and no schema read, however small the memory for those before."""
    monkeypatch.setattr("jetspec.engine.constraint.CACHE_BYTES", 0)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server:
        made: list[Grammar] = []
        compile = Grammars.compile

        def count(self: Grammars, grammar: Grammar) -> object:
            made.append(grammar)
            return compile(self, grammar)

        monkeypatch.setattr(Grammars, "compile", count)
        done = server.chat(response_format=schema_format({"type": "boolean"}), n=5, max_tokens=4)
        assert done.status_code == 200 and len(made) == 1
