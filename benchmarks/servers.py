"""OpenAI-compatible servers: a client that times their streams, and the process of our own."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 600.0
KEEP_ALIVE_S = 2.0
"""Idle connections are not used again after this time: servers close theirs after a few seconds."""
SETTLE_S = 20.0
MAX_REASON = 500
"""Characters kept of a server's error message."""
CHAT, COMPLETIONS = "/chat/completions", "/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
LEFT = "the client left"
BROKEN = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a request to a server that answers nonsense, or not at all."""


@dataclass
class Timing:
    """A streamed answer with its times in seconds, or its error."""

    arrived: float
    chunks: list[float] = field(default_factory=list)
    """Times of the pieces."""
    ended: float = 0.0
    error: str | None = None
    status: int | None = None
    """HTTP status. None: no answer began."""
    pieces: list[str] = field(default_factory=list)
    """Text of every piece; that of a finish reason may be empty."""
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text without lone surrogates, which JSON can spell and no file can hold."""
        return readable("".join(self.pieces))

    @property
    def said(self) -> list[tuple[float, str]]:
        """Pieces with text, and their times."""
        return [(at, piece) for at, piece in zip(self.chunks, self.pieces, strict=True) if piece]

    def note(self, event: dict[str, Any]) -> None:
        """Add an event of the stream."""
        if error := event.get("error"):
            self.error = readable(str(error["message"] if isinstance(error, dict) else error))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            piece, finish = choice.get("text") or choice.get("delta", {}).get("content"), choice.get("finish_reason")
            self.finish = finish or self.finish
            if piece or finish:
                self.chunks.append(time.perf_counter())
                self.pieces.append(piece or "")


def readable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def connect(api: str, most: int | None = None, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client of the API at this URL, with so many connections at most; without a limit, none is used twice."""
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most or 0, keepalive_expiry=KEEP_ALIVE_S)
    return httpx.AsyncClient(base_url=api, headers=headers, limits=limits, timeout=TIMEOUT_S)


async def follow(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], timing: Timing, leave_after: int | None = None
) -> None:
    """Stream an answer into `timing`, with its error. The client leaves after more than `leave_after` pieces."""
    try:
        async with client.stream("POST", path, json=dict(body)) as answer:
            timing.status = answer.status_code
            if answer.status_code != 200:
                timing.error = reason(answer.status_code, (await answer.aread()).decode(errors="replace"))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    timing.note(json.loads(line.removeprefix("data:")))
                if leave_after is not None and len(timing.chunks) > leave_after:
                    timing.error = LEFT
                    return
        count = timing.usage.get("completion_tokens")
        if timing.error is None and (timing.finish is None or count is None):
            timing.error = "the stream ended without a finish reason and a count of tokens"
        elif timing.error is None and not (isinstance(count, int) and count >= 0):
            timing.error = f"the server counts {count!r} tokens"
    except BROKEN as error:
        timing.error = readable(f"{type(error).__name__}: {error}")
    timing.ended = time.perf_counter()


def reason(status: int, text: str) -> str:
    """A server's error in one line."""
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {' '.join(text.split())[:MAX_REASON]}"


def stream_together(api: str, bodies: Sequence[Mapping[str, Any]]) -> list[Timing]:
    """Answers to chats that are sent at the same time."""

    async def run() -> list[Timing]:
        async with connect(api) as client:
            timings = [Timing(time.perf_counter()) for _ in bodies]
            await asyncio.gather(*(follow(client, CHAT, *each) for each in zip(bodies, timings, strict=True)))
            return timings

    return asyncio.run(run())


def first_model(api: str, headers: Mapping[str, str] | None = None) -> str:
    try:
        answer = httpx.get(f"{api.rstrip('/')}/models", headers=headers, timeout=30)
        if answer.status_code != 200:
            raise ValueError(reason(answer.status_code, answer.text))
        return str(answer.json()["data"][0]["id"])
    except BROKEN as error:
        raise ValueError(f"no OpenAI-compatible server answers at {api} ({error})") from None


class ServerProcess:
    """`jetspec serve` as a process, on a free port, with its log in a file."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "jetspec", "serve", "--model", model, "--port", "0", *options]
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self._log)

    def __enter__(self) -> ServerProcess:
        while self.process.poll() is None:
            if found := re.search(r"Serving (\S+) at (http://\S+)/v1", self.log):
                self.model, self.url = found.groups()
                return self
            time.sleep(0.05)
        raise RuntimeError(self.log)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def footprint(self) -> dict[str, int]:
        """Numbers that must not grow."""
        proc = Path(f"/proc/{self.process.pid}")
        metrics = httpx.get(f"{self.url}/metrics", headers={"Connection": "close"}).text
        pages = re.search(r"^jetspec:pages_in_use (\S+)", metrics, re.MULTILINE)
        assert pages is not None
        held = {name: len(list((proc / folder).iterdir())) for name, folder in (("threads", "task"), ("files", "fd"))}
        return {"pages": int(float(pages[1])), **held}

    def settled(self, before: dict[str, int]) -> dict[str, int]:
        """Footprint once nothing more is released."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = self.footprint()
            if all(now[name] <= most for name, most in before.items()) or time.monotonic() > deadline:
                return now
            time.sleep(0.2)
