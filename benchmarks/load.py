"""A load of requests on an OpenAI-compatible server, and how long they took.

Requests arrive at random, a given number per second on average (a Poisson process), or one after the other on so many
lanes. Times are the client's: what a user would see.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

PERCENTILES = (50, 95, 99)
TIMEOUT_S = 600.0
KEEP_ALIVE_S = 2.0
"""Idle connections are not used again after this time: servers close theirs after a few seconds, maybe just then."""
GIVEN_UP = "not answered in time"

Message = dict[str, str]


@dataclass(frozen=True)
class Load:
    """What is sent."""

    url: str
    requests: int
    concurrency: int
    rate: float | None
    """Arrivals per second; those beyond `concurrency` wait, and their waiting counts. None: one by one on each lane."""
    max_tokens: int
    temperature: float
    budget: int | None
    """Of a JetSpec server's trees. None: its own."""
    model: str | None
    seed: int

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the url is {self.url!r}; it begins with http:// or https://")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise ValueError(f"rate is {self.rate}; it must be positive")

    @property
    def base_url(self) -> str:
        """Without the /v1 that clients are often given."""
        return self.url.rstrip("/").removesuffix("/v1")

    def arrivals(self) -> list[float]:
        """Seconds after the start at which requests come."""
        if self.rate is None:
            return [0.0] * self.requests
        rng, at, times = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            at += rng.expovariate(self.rate)
            times.append(at)
        return times


@dataclass
class Timing:
    """One request. Times are in seconds; `error` says why it has none."""

    arrived: float
    chunks: list[float] = field(default_factory=list)
    """When pieces of text came."""
    ended: float = 0.0
    tokens: int = 0
    rounds: int = 0
    error: str | None = None
    text: str = ""

    @property
    def first_s(self) -> float:
        return self.chunks[0] - self.arrived

    @property
    def whole_s(self) -> float:
        return self.ended - self.arrived

    @property
    def between_s(self) -> float:
        """Mean time between tokens, after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Part:
    """Those of a load's requests that one of several processes sends: from `first` on, every `step`-th."""

    first: int = 0
    step: int = 1
    began: float | None = None
    """On `time.perf_counter`, which all processes share: what arrivals count from. None: now."""
    patience_s: float | None = None
    """Requests that have no answer so long after the last arrival are given up. None: never."""


WHOLE = Part()


async def send_load(
    load: Load,
    chats: Sequence[list[Message]],
    key: str | None,
    done: Callable[[], object] = lambda: None,
    part: Part = WHOLE,
) -> list[Timing]:
    """Send everything; chats are taken by turns. A request that fails is counted, not repeated."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(
        max_connections=load.concurrency,
        max_keepalive_connections=load.concurrency,
        keepalive_expiry=KEEP_ALIVE_S,
    )
    async with httpx.AsyncClient(base_url=load.base_url, headers=headers, limits=limits, timeout=TIMEOUT_S) as client:
        model = load.model or await first_model(client)
        lanes = asyncio.Semaphore(load.concurrency)
        began = time.perf_counter() if part.began is None else part.began
        arrivals = load.arrivals()
        end = math.inf if part.patience_s is None else began + arrivals[-1] + part.patience_s

        async def one(number: int) -> Timing:
            timing = Timing(began + arrivals[number])  # a client that wakes up late is slow, and that counts
            await asyncio.sleep(max(0.0, timing.arrived - time.perf_counter()))
            try:
                async with asyncio.timeout(end - time.perf_counter()), lanes:
                    if load.rate is None:
                        timing.arrived = time.perf_counter()
                    await follow(client, _body(load, model, chats[number % len(chats)]), timing)
            except TimeoutError:
                timing.error = GIVEN_UP
            done()
            return timing

        return await asyncio.gather(*(one(number) for number in range(part.first, load.requests, part.step)))


async def first_model(client: httpx.AsyncClient) -> str:
    try:
        answer = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ValueError(f"nobody answers at {client.base_url} ({type(error).__name__}); is the server up?") from None
    if answer.status_code != 200:
        raise ValueError(f"{client.base_url} lists no models: {_reason(answer.status_code, answer.text)}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{client.base_url} is no OpenAI-compatible server") from None


async def follow(client: httpx.AsyncClient, body: dict[str, Any], timing: Timing) -> None:
    """One streamed chat, piece by piece."""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                timing.error = _reason(answer.status_code, (await answer.aread()).decode(errors="replace"))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _note(json.loads(line.removeprefix("data: ")), timing)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        timing.error = type(error).__name__
    timing.ended = time.perf_counter()
    if timing.error is None and not (timing.chunks and timing.tokens):
        timing.error = "the stream has no text or no usage"


def _note(chunk: dict[str, Any], timing: Timing) -> None:
    if "error" in chunk:
        timing.error = str(chunk["error"]["message"])
        return
    if any(choice["delta"].get("content") or choice.get("finish_reason") for choice in chunk["choices"]):
        timing.chunks.append(time.perf_counter())
        timing.text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if usage := chunk.get("usage"):
        timing.tokens = usage["completion_tokens"]
        timing.rounds = usage.get("jetspec", {}).get("rounds", 0)


def _body(load: Load, model: str, chat: list[Message]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": chat,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body if load.budget is None else {**body, "jetspec": {"budget": load.budget}}


def _reason(status: int, text: str) -> str:
    """What a server says of a failure, in one line."""
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def summarize(timings: Sequence[Timing]) -> dict[str, Any]:
    """Percentiles in milliseconds, throughput over the whole time, and errors by kind."""
    good = [timing for timing in timings if timing.error is None]
    summary: dict[str, Any] = {
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "errors": dict(Counter(timing.error for timing in timings if timing.error)),
    }
    if not good:
        return summary
    seconds = max(t.ended for t in good) - min(t.arrived for t in good)
    tokens, rounds = sum(t.tokens for t in good), sum(t.rounds for t in good)
    return summary | {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_round": tokens / rounds if rounds else None,
        "first_token_ms": percentiles([t.first_s for t in good]),
        "between_tokens_ms": percentiles([t.between_s for t in good]),
        "whole_ms": percentiles([t.whole_s for t in good]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.asarray(seconds) * 1000, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
