"""A server over a tiny model, in a thread of the test process, so that tests can reach its internals."""

from __future__ import annotations

import asyncio
import asyncio.events
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.llm import LLM
from jetspec.serve.app import Server
from jetspec.serve.config import ServeConfig
from jetspec.serve.run import HttpServer, open_socket
from jetspec.types import Update

NAME = "tiny"


def tiny_llm(folder: Path, *, max_batch: int = 8, budget: int = 8) -> LLM:
    config = EngineConfig(max_batch=max_batch, page_size=4)
    return LLM(folder, drafter="ngram", tree=TreeConfig(budget=budget, width=4), engine=config, device="cpu")


class Live:
    """A running server."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        self.llm, self.config = llm, config
        self.server = Server(llm, config)
        self.host = HttpServer(self.server)
        self.listener = open_socket(config)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=lambda: asyncio.run(self.host.serve([self.listener])))

    def __enter__(self) -> Live:
        self.thread.start()
        wait_until(lambda: self.host.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.host.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive(), "the server hangs"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": NAME, "prompt": "ab", **body}, timeout=60)

    def chat(self, **body: Any) -> httpx.Response:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    @property
    def pages_in_use(self) -> int:
        return self.llm.engine.cache.pool.num_used

    def wait_for_rest(self) -> None:
        """Wait until no request is open and every page is free."""
        wait_until(lambda: not (self.server.worker.num_open or self.pages_in_use or self.llm.engine.requests))

    @contextmanager
    def callback_times(self) -> Iterator[list[float]]:
        """CPU seconds of every callback of the event loop, during which no other client is served.

        CPU time of one thread does not depend on what else runs on the machine.
        """
        times, run = [0.0], asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run(handle)
            if threading.current_thread() is self.thread:
                times.append(time.thread_time() - start)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]
        try:
            yield times
        finally:
            asyncio.events.Handle._run = run  # type: ignore[method-assign]


class Gate:
    """Holds the engine of a server between two steps."""

    def __init__(self, live: Live, patch: pytest.MonkeyPatch | None = None) -> None:
        self.step = live.llm.engine.step
        self.open = threading.Event()
        self.open.set()
        self.rounds = 0
        (patch or pytest.MonkeyPatch()).setattr(live.llm.engine, "step", self.held)

    def held(self) -> list[Update]:
        self.open.wait(60)
        self.rounds += 1
        return self.step()


def wait_until(is_true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def assert_error(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """Checks status and parameter of an error, and that its body has OpenAI's form. Returns the error."""
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"} and len(response.content) < 1000
    assert not any(word in error["message"] for word in ("Traceback", "jetspec/", "Value error", "Check failed"))
    return error


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, up to its end marker."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


def joined(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices of a whole chat response, from the chunks of its stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        message = {"role": "assistant", "content": None, "refusal": None}
        choice = choices.setdefault(part["index"], {"index": part["index"], "message": message, "logprobs": None})
        message, delta = choice["message"], part["delta"]
        if "content" in delta:
            message["content"] = (message["content"] or "") + delta["content"]
        if "tool_calls" in delta:
            message["tool_calls"] = message.get("tool_calls", []) + delta["tool_calls"]
        if part["logprobs"]:
            known = choice["logprobs"] or {"content": []}
            choice["logprobs"] = {"content": known["content"] + part["logprobs"]["content"]}
        choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


@contextmanager
def streaming(live: Live, **body: Any) -> Iterator[httpx.Response]:
    body = {"model": NAME, "prompt": "ab", "stream": True, **body}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
        yield response
