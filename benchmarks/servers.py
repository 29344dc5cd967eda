"""OpenAI-compatible servers as a method, over a stream."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from benchmarks.methods import Ask, Reply, Timed, UnequalConditions, split_time
from jetspec.models.tokenizer import Tokenizer
from jetspec.types import SamplingParams

TIMEOUT_S, VERSION_TIMEOUT_S = 600, 10
MAX_REASON = 500
"""Bytes kept of a server's error message."""


class ServerMethod:
    """A server that counts its own tokens and applies its own template.

    Its prefill lasts until the last of the group has its first text, or one of them has more than that: a server that
    serves them one after the other decodes by then. Answers in one piece show no prefill: all of the time is decoding.
    """

    def __init__(self, tokenizer: Tokenizer, url: str, model: str | None, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.url = tokenizer, url.rstrip("/")
        self.model = model or first_model(url)
        self.settings = neutral_sampling(self.url, self.model)
        if variables:
            self.settings["chat_template_kwargs"] = dict(variables)

    def warm_up(self, asks: Sequence[Ask]) -> None:
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(asks)) as pool:
            answers = list(pool.map(self._answer, asks))
        ended = time.perf_counter()
        done = [(reply, streamed) for reply, streamed in answers if isinstance(reply, Reply) and streamed]
        prefilled = prefill_end([(reply, streamed.times) for reply, streamed in done], began, ended)
        early = sum(self._early(reply, streamed, prefilled) for reply, streamed in done)
        written = sum(reply.num_tokens for reply, _ in done)
        times = split_time(began, prefilled, ended, written, len(done), early)
        return Timed([reply for reply, _ in answers], *times)

    def _early(self, reply: Reply, streamed: Streamed, prefilled: float) -> int:
        """Tokens of the first piece without the first one, if it came during prefill."""
        if not streamed.times or streamed.times[0] > prefilled:
            return 0
        size = len(self.tokenizer.encode_words(streamed.pieces[0]))
        return max(0, min(size, reply.num_tokens) - 1)

    def _answer(self, ask: Ask) -> tuple[Reply | str, Streamed | None]:
        try:
            return self._follow(ask)
        except UnequalConditions:
            raise
        except BROKEN as error:
            return f"{type(error).__name__}: {readable(str(error))}", None

    def _follow(self, ask: Ask) -> tuple[Reply, Streamed]:
        streamed = stream(self.url, chat_body(self.model, ask, self.settings))
        usage, text = streamed.usage, readable(streamed.text)
        count = usage["completion_tokens"]
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"the server counts {count!r} tokens")
        num_read = usage["prompt_tokens"]
        is_other = num_read != len(ask.prompt)
        if is_other and ask.turn == 0:
            raise UnequalConditions(
                f"{self.url} read {num_read} prompt tokens where ours are {len(ask.prompt)}: it runs"
                " another model or another chat template, so the two cannot be compared"
            )
        ids = self.tokenizer.encode_words(text)
        return Reply(ids, text, streamed.finish, count, None, num_read, other_prompt=is_other), streamed


BROKEN = (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError)
"""Errors of a request to a server that answers nonsense, or not at all."""


@dataclass(frozen=True)
class Streamed:
    pieces: list[str]
    times: list[float]
    """Time of each piece."""
    finish: str
    usage: Mapping[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


NEUTRAL = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Servers fill what a request leaves open from the model's generation_config.json, or with values of their own."""
BEYOND = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Likewise; these are none of OpenAI's fields, so a server may refuse them."""


class BadRequest(ValueError):
    """The server refuses the request."""


def neutral_sampling(url: str, model: str) -> dict[str, Any]:
    """Settings that sample from the model's distribution alone; OpenAI's fields only where others are refused."""
    for settings in ({**NEUTRAL, **BEYOND}, NEUTRAL):
        try:
            stream(url, chat_body(model, _probe(1), settings))
        except BadRequest:
            continue
        except BROKEN:
            break
        return dict(settings)
    return {**NEUTRAL, **BEYOND}


def left_open(settings: Mapping[str, Any]) -> list[str]:
    """Settings that a server given these chooses by itself."""
    return [name for name in (*NEUTRAL, *BEYOND) if name not in settings]


def chat_body(model: str, ask: Ask, settings: Mapping[str, Any]) -> dict[str, Any]:
    sampling = ask.sampling
    return {
        "model": model,
        "messages": list(ask.messages),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": (sampling.seed or 0) & 0x7FFFFFFF,
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings,
    }


def stream(url: str, body: Mapping[str, Any]) -> Streamed:
    """Request a chat completion and read its stream to the end."""
    pieces, times, finish, usage = [], [], None, None
    for event in _events(url, body):
        if event.get("error"):
            raise ValueError(f"the server says {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if piece := choice.get("delta", {}).get("content"):
                times.append(time.perf_counter())
                pieces.append(piece)
            finish = choice.get("finish_reason") or finish
    if usage is None or finish is None:
        raise ValueError("the stream ended without a finish reason and a count of tokens")
    return Streamed(pieces, times, finish, usage)


def _events(url: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with _open(request) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if line.startswith(b"data:") and data:
                yield json.loads(data)


def _open(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        said = " ".join(error.read(MAX_REASON).decode("utf-8", "replace").split())
        refused = BadRequest if 400 <= error.code < 500 else ValueError
        raise refused(f"{error}: {said}" if said else str(error)) from None


def prefill_end(answers: Sequence[tuple[Reply | str, Sequence[float]]], began: float, ended: float) -> float:
    """Time at which the prompts of a group were read, from the times of the pieces of every answer."""
    written = [(reply, pieces) for reply, pieces in answers if isinstance(reply, Reply) and pieces]
    if not written:
        return ended
    # A piece of two tokens may be a word and the end, and tells when prefill was over; a longer one does not.
    if all(len(pieces) == 1 for _, pieces in written) and any(reply.num_tokens > 2 for reply, _ in written):
        return began
    later = [pieces[1] for _, pieces in written if len(pieces) > 1]
    return min([max(pieces[0] for _, pieces in written), *later])


def readable(text: str) -> str:
    """Text without lone surrogates, which JSON can spell and no file can hold."""
    return text.encode("utf-8", "replace").decode()


PROBE = "Write the numbers from one to twenty as words."
PROBE_TOKENS = 16


def identify(url: str, model: str | None) -> dict[str, Any] | None:
    """Model, version, settings and digest of a greedy answer, which tells weights apart. None: no server answers."""
    try:
        name = model or first_model(url)
    except ValueError:
        return None
    settings = neutral_sampling(url, name)
    try:
        text = stream(url, chat_body(name, _probe(PROBE_TOKENS), settings)).text
    except BROKEN as error:
        text = type(error).__name__
    return {
        "model": name,
        "version": server_version(url),
        "sampling": settings,
        "probe": hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16],
    }


def _probe(max_tokens: int) -> Ask:
    return Ask([{"role": "user", "content": PROBE}], [], SamplingParams(0.0, max_tokens=max_tokens))


def server_version(url: str) -> str | None:
    """Version as vLLM and SGLang give theirs, llama.cpp its build. None: the server does not tell."""
    root = url.rstrip("/").removesuffix("/v1")
    for path, key in (("version", "version"), ("get_server_info", "version"), ("props", "build_info")):
        try:
            with urllib.request.urlopen(f"{root}/{path}", timeout=VERSION_TIMEOUT_S) as response:
                return str(json.load(response)[key])
        except BROKEN:
            continue
    return None


def first_model(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/models", timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no OpenAI-compatible server answers at {url} ({error})") from None
