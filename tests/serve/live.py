"""A server over a model small enough to write to disk, in a thread of the test, so that tests see its inside."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.llm import LLM
from jetspec.serve.app import Server
from jetspec.serve.config import ServeConfig
from jetspec.serve.run import HttpServer, open_socket

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
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server hangs"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": NAME, "prompt": "ab", **body}, timeout=60)

    def chat(self, **body: Any) -> httpx.Response:
        asked = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=asked, timeout=60)

    @property
    def pages_in_use(self) -> int:
        pool = self.llm.engine.cache.pool
        return pool.num_pages - pool.num_available

    def wait_for_rest(self) -> None:
        """Until nothing is open and every page is back."""
        wait_until(lambda: not (self.server.worker.num_open or self.pages_in_use or self.llm.engine.requests))


def wait_until(is_true: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, which must end as streams do."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


@contextmanager
def streaming(live: Live, **body: Any) -> Iterator[httpx.Response]:
    asked = {"model": NAME, "prompt": "ab", "stream": True, **body}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=asked, timeout=60) as response:
        yield response
