"""Outside contenders: what people decode with today, behind the interface of our own methods."""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

import torch
from torch import Tensor

from jetspec.bench.methods import Ask, Reply, Timed, Unequal
from jetspec.bench.recipe import MethodConfig
from jetspec.models.hub import resolve
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import Target

LOOKUP_TOKENS = 10
TIMEOUT_S = 600
MAX_REASON = 500
"""Bytes kept of what a server says of a failure."""


def check_ready(method: MethodConfig) -> None:
    """Whether the package is there, the assistant can be had, the server answers."""
    if method.url is not None:
        first_model(method.url)
    elif importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{method.name} needs the package `transformers`: pip install 'jetspec[bench]'")
    elif method.assistant is not None:
        resolve(method.assistant)


def lookup_tokens(method: MethodConfig) -> int | None:
    return (method.lookup_tokens or LOOKUP_TOKENS) if method.kind_name == "transformers-lookup" else None


class TransformersMethod:
    """`generate` of transformers over the same weights: plain, with an assistant model, or with prompt lookup.

    Its prefill is its first pass, from which it also takes the first token.
    """

    def __init__(self, target: Target, max_len: int, assistant: str | None, lookup: int | None) -> None:
        from jetspec.models.hf_target import load_hf

        embedding = target.decoder.embedding
        self.target, self.max_len, self.device = target, max_len, embedding.device
        self.model = load_hf(target.path, embedding.dtype, embedding.device)
        self.lookup = lookup
        self.assistant = load_hf(resolve(assistant), embedding.dtype, embedding.device) if assistant else None
        self.model.register_forward_hook(self._after_pass)

    def warm_up(self, asks: Sequence[Ask]) -> None:
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        token_BT, mask_BT = self._pad([ask.prompt for ask in asks])
        counter = RoundCounter() if self.assistant or self.lookup else None
        self.prefilled: float | None = None
        torch.manual_seed(asks[0].sampling.seed or 0)
        began = time.perf_counter()
        out_BT = self.model.generate(  # type: ignore[operator]
            token_BT,
            attention_mask=mask_BT,
            generation_config=self._settings(asks),
            assistant_model=self.assistant,
            streamer=counter,
        )
        written = out_BT[:, token_BT.shape[1] :].tolist()
        ended = time.perf_counter()
        assert self.prefilled is not None
        replies: list[Reply | str] = [
            self._reply(ask, tokens, counter) for ask, tokens in zip(asks, written, strict=True)
        ]
        return Timed(replies, self.prefilled - began, ended - self.prefilled)

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        tokens = [[self._padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(tokens, device=self.device), torch.tensor(mask, device=self.device)

    @property
    def _padding(self) -> int:
        return min(self.target.eos_tokens, default=0)

    def _room(self, ask: Ask) -> int:
        """Tokens that an answer may have, as in our engine: those of its own prompt's room, not of the longest one."""
        return max(1, min(ask.sampling.max_tokens, self.max_len - len(ask.prompt)))

    def _settings(self, asks: Sequence[Ask]) -> Any:
        """Our rules and none of the model's own: no filters, no penalties.

        A whole batch is given the room of its shortest prompt, and what others write beyond theirs is cut off.
        """
        from transformers import GenerationConfig

        sampling = asks[0].sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        ends = None if sampling.ignore_eos else sorted(self.target.eos_tokens) or None
        return GenerationConfig(
            max_new_tokens=max(map(self._room, asks)),
            eos_token_id=ends,
            pad_token_id=self._padding,
            prompt_lookup_num_tokens=self.lookup,
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )

    def _reply(self, ask: Ask, tokens: list[int], counter: RoundCounter | None) -> Reply:
        """Up to the first end token, or the end of its room; the rest of a row is padding."""
        tokens = tokens[: self._room(ask)]
        ends = frozenset() if ask.sampling.ignore_eos else self.target.eos_tokens
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        kept = tokens[:end]
        accepted = [0] * len(kept) if counter is None else counter.accepted(len(kept))
        finish = "length" if end is None else "stop"
        return Reply(kept, self.target.tokenizer.decode(kept), finish, len(kept), accepted)

    def _after_pass(self, *_: object) -> None:
        if self.prefilled is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.prefilled = time.perf_counter()


class RoundCounter:
    """Sees the tokens of every round of assisted generation, after the prompt."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.lengths.append(tokens.numel())

    def end(self) -> None:
        pass

    def accepted(self, num_tokens: int) -> list[int]:
        """Draft tokens kept per round, of the rounds that wrote these tokens."""
        lengths = []
        for length in self.lengths[1:]:
            if num_tokens <= 0:
                break
            lengths.append(min(length, num_tokens) - 1)
            num_tokens -= length
        return lengths


class ServerMethod:
    """Any OpenAI-compatible server, asked over a stream. It counts its own tokens and applies its own template.

    Its prefill lasts until the last of the group has its first text, or until one of them has more than that: a server
    that takes them one after the other is decoding by then. Answers that come in one piece show no prefill, and all of
    the time counts as decoding.
    """

    def __init__(self, tokenizer: Tokenizer, url: str, model: str | None, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.url, self.variables = tokenizer, url.rstrip("/"), variables
        self.model = model or first_model(url)

    def warm_up(self, asks: Sequence[Ask]) -> None:
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(asks)) as pool:
            answers = list(pool.map(self._answer, asks))
        ended = time.perf_counter()
        prefilled = prefill_end(answers, began, ended)
        return Timed([reply for reply, _ in answers], prefilled - began, ended - prefilled)

    def _answer(self, ask: Ask) -> tuple[Reply | str, list[float]]:
        """The reply and when its pieces came, or what went wrong."""
        try:
            return self._follow(ask)
        except Unequal:
            raise
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {readable(str(error))}", []

    def _follow(self, ask: Ask) -> tuple[Reply, list[float]]:
        text, finish, usage, pieces = "", None, None, []
        for event in self._events(self._body(ask)):
            if event.get("error"):
                raise ValueError(f"the server says {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                if piece:
                    pieces.append(time.perf_counter())
                text += piece
                finish = choice.get("finish_reason") or finish
        if usage is None or finish is None:
            raise ValueError("the stream ended without a finish reason and a count of tokens")
        count = usage["completion_tokens"]
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"the server counts {count!r} tokens")
        if ask.turn == 0 and usage["prompt_tokens"] != len(ask.prompt):
            raise Unequal(
                f"{self.url} read {usage['prompt_tokens']} prompt tokens where ours are {len(ask.prompt)}: it runs"
                " another model or another chat template, so the two cannot be compared"
            )
        text = readable(text)
        return Reply(self.tokenizer.encode_words(text), text, finish, count, None), pieces

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling
        body = {
            "model": self.model,
            "messages": list(ask.messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": (sampling.seed or 0) & 0x7FFFFFFF,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"chat_template_kwargs": dict(self.variables)} if self.variables else {})

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            said = " ".join(error.read(MAX_REASON).decode("utf-8", "replace").split())
            raise ValueError(f"{error}: {said}" if said else str(error)) from None

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of an event stream."""
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._open(request) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith(b"data:") and data:
                    yield json.loads(data)


def prefill_end(answers: Sequence[tuple[Reply | str, Sequence[float]]], began: float, ended: float) -> float:
    """When the prompts of a group were read, from when the pieces of every answer came."""
    written = [(reply, pieces) for reply, pieces in answers if isinstance(reply, Reply) and pieces]
    if not written:
        return ended
    # A piece of two tokens may be a word and the end, and tells when prefill was over; a longer one does not.
    if all(len(pieces) == 1 for _, pieces in written) and any(reply.num_tokens > 2 for reply, _ in written):
        return began
    later = [pieces[1] for _, pieces in written if len(pieces) > 1]
    return min([max(pieces[0] for _, pieces in written), *later])


def readable(text: str) -> str:
    """Without halves of characters, which JSON can spell and no file can hold."""
    return text.encode("utf-8", "replace").decode()


def first_model(url: str) -> str:
    """The first model that a server offers."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/models", timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no OpenAI-compatible server answers at {url} ({error})") from None
