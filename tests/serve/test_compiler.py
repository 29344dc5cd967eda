"""A schema that takes long to compile costs its sender an answer, and nobody else anything."""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from jetspec.engine.constraint import Grammars
from jetspec.engine.llm import LLM
from jetspec.engine.trial import Trial
from jetspec.serve import compiler, schema
from jetspec.serve.config import ServeConfig
from jetspec.types import Grammar
from tests.serve.live import Live, tiny_llm, wait_until
from tests.serve.test_forms import COUNTED, schema_format

SLOW, QUICK = Grammar("json_schema", json.dumps(COUNTED)), Grammar("json_schema", '{"type": "boolean"}')
SLOW_CALLS = Grammar("calls", json.dumps({"begin": "<", "end": ">", "schema": COUNTED}))


def children() -> set[BaseProcess]:
    """Processes of this one. Other tests may keep some, too."""
    return set(multiprocessing.active_children())


@pytest.mark.parametrize("slow", [SLOW, SLOW_CALLS], ids=lambda grammar: grammar.kind)
def test_a_trial_ends_what_takes_too_long(alone: LLM, slow: Grammar) -> None:
    others, trial = children(), Trial(alone.grammars, 0.5)
    try:
        trial.run(QUICK)
        (process,) = children() - others
        with pytest.raises(TimeoutError):
            trial.run(slow)
        assert not process.is_alive()
        with pytest.raises(ValueError, match="negative"):
            trial.run(Grammar("json_schema", '{"type": "string", "minLength": -1}'))
        trial.run(QUICK)
    finally:
        trial.stop()
    wait_until(lambda: not children() - others)
    with pytest.raises(ChildProcessError):
        trial.run(QUICK)


def test_a_slow_schema_does_not_disable_those_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = children()
    monkeypatch.setattr(compiler, "COMPILE_S", 1.0)
    monkeypatch.setattr(schema, "MAX_STATES", 1 << 30)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, ThreadPoolExecutor(2) as pool:
        assert server.chat(response_format=schema_format({"type": "null"}), max_tokens=4).status_code == 200
        slow = pool.submit(server.chat, response_format=schema_format(COUNTED), max_tokens=4)
        time.sleep(0.3)
        known = pool.submit(server.chat, response_format=schema_format({"type": "null"}), max_tokens=4)
        assert known.result().status_code == 200 and not slow.done(), "what is compiled already does not wait"
        other = server.chat(response_format=schema_format({"type": "boolean"}), max_tokens=4)
        assert (slow.result().status_code, other.status_code) == (400, 200)
        assert "longer than 1 s" in slow.result().json()["error"]["message"]

        monkeypatch.setattr(compiler, "WAIT_S", 0.1)
        again = pool.submit(server.chat, response_format=schema_format(COUNTED), max_tokens=4)
        time.sleep(0.3)
        busy = server.chat(response_format=schema_format({"type": "integer"}), max_tokens=4)
        assert busy.status_code == 503 and int(busy.headers["Retry-After"]) > 0
        assert again.result().status_code == 400
    wait_until(lambda: not children() - others)


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
