"""Engine updates become a response body, or the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from jetspec.models.tokenizer import Tokenizer
from jetspec.serve import protocol as api
from jetspec.serve.tools import ToolReader
from jetspec.serve.worker import Job
from jetspec.types import Completion, TokenLogprob, Update


class SpeedMeter:
    """Tokens per second of one completion. The clock starts at the end of the first round, which has no speed."""

    def __init__(self) -> None:
        self.start_s: float | None = None
        self.rounds, self.tokens = 0, 0
        """`tokens` leaves out those of the first round."""

    def add(self, update: Update, now: float) -> float:
        self.rounds += 1
        if self.start_s is None:
            self.start_s = now
            return 0.0
        self.tokens += len(update.token_ids)
        return self.tokens / (now - self.start_s) if now > self.start_s else 0.0


class Vocabulary:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._shown: dict[int, tuple[str, list[int]]] = {}

    def raw(self, token: int) -> bytes:
        """Bytes that the token adds to a text; a control token adds none."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def label(self, token: int) -> str:
        """One printable line."""
        return self._tokenizer.token_text(token)

    def shown(self, token: int) -> tuple[str, list[int]]:
        """Text and bytes in the API: a control token has its name as text. Cached: up to 20 per generated token."""
        if token not in self._shown:
            raw = self.raw(token)
            self._shown[token] = raw.decode(errors="replace") or self.label(token), list(raw)
        return self._shown[token]

    def top(self, token: int, logprob: float) -> api.TopLogprob:
        text, raw = self.shown(token)
        return {"token": text, "logprob": logprob, "bytes": raw}


class TextOffsets:
    """Offsets of tokens in their text, in characters. A token inside a character has the offset of the character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, raw: bytes) -> int:
        if raw and raw[0] & 0xC0 != 0x80:  # first byte of a character, so the previous one is complete
            self._length += len(self._decoder.decode(b"", final=True))
        offset = self._length
        self._length += len(self._decoder.decode(raw))
        return offset


class BaseResponse:
    """Collects the updates of one HTTP request. A subclass makes the choices of its kind of response."""

    prefix: ClassVar[str]
    """Beginning of the response id."""
    whole_type: ClassVar[type[BaseModel]]
    chunk_type: ClassVar[type[BaseModel]]

    def __init__(self, job: Job, vocab: Vocabulary, model: str) -> None:
        self.vocab, self.job = vocab, job
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.speeds = [SpeedMeter() for _ in range(job.num_completions)]
        self.completions: dict[int, Completion] = {}

    def add(self, index: int, update: Update) -> Any:
        """Record an update."""
        if update.completion:
            self.completions[index] = update.completion

    def chunk(self, index: int, update: Update) -> BaseModel | None:
        """Record an update. Returns its chunk, if there is one to send."""
        trace = self._trace(index, update)
        choice = self._part(index, update, trace is not None)
        return choice and self.chunk_type(**self.head, choices=[choice], jetspec=trace)

    def usage_chunk(self) -> BaseModel:
        return self.chunk_type(**self.head, choices=[], usage=self._usage())

    def whole(self) -> BaseModel:
        """The response with all completions."""
        choices = [self._choice(index, done) for index, done in sorted(self.completions.items())]
        return self.whole_type(**self.head, choices=choices, usage=self._usage())

    def _part(self, index: int, update: Update, is_traced: bool) -> Any:
        """Record an update. Returns the choice of its chunk; None if there is nothing to send."""

    def _choice(self, index: int, done: Completion) -> Any:
        """Returns the choice of a finished completion."""

    def _visible(self, logprobs: list[TokenLogprob] | None) -> list[TokenLogprob]:
        """Entries of the tokens that add to the text: not that of the end token, for instance."""
        return [entry for entry in logprobs or [] if self.vocab.raw(entry.token)] if self.job.shows_logprobs else []

    def _usage(self) -> api.Usage:
        """Usage of all completions. Those of one prompt share it: counted once, with the first one's cached tokens."""
        stats = [self.completions[index].stats for index in range(len(self.completions))]
        firsts = stats[:: self.job.count]
        prompt, generated = sum(s.prompt_tokens for s in firsts), sum(s.completion_tokens for s in stats)
        rounds = sum(s.rounds for s in stats)
        return api.Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=api.CachedTokens(cached_tokens=sum(s.cached_tokens for s in firsts)),
            jetspec=api.RoundUsage(rounds=rounds, tokens_per_round=generated / max(rounds, 1)),
        )

    def _trace(self, index: int, update: Update) -> api.TracedRound | None:
        """The round of an update, if the request has `trace`."""
        if update.trace is None:
            return None
        assert update.logprobs is not None, "a request with a trace has log-probabilities"
        speed = self.speeds[index].add(update, time.perf_counter())
        tokens = []
        for depth, entry in enumerate(update.logprobs, 1):
            draft = update.trace.logprobs[update.trace.path[depth]] if depth < len(update.trace.path) else None
            text = self.vocab.raw(entry.token).decode(errors="replace")
            tokens.append(api.TracedToken(text=text, depth=depth, logprob=entry.logprob, draft_logprob=draft))
        return api.TracedRound(
            round=self.speeds[index].rounds,
            tokens=tokens,
            tree=api.TracedTree(
                tokens=[self.vocab.label(token) for token in update.trace.tokens],
                parents=update.trace.parents,
                scores=update.trace.scores,
                path=update.trace.path,
                bonus=self.vocab.label(update.trace.bonus),
            ),
            tokens_per_s=speed,
        )


@dataclass
class ChatState:
    """One completion of a chat so far."""

    reader: ToolReader | None
    is_begun: bool = False
    """A chunk with the role was sent."""
    text: str = ""
    calls: list[api.ResponseToolCall] = field(default_factory=list)
    finish: api.FinishReason | None = None
    """`tool_calls` if there are any, unless the length limit has cut one off."""


class ChatResponse(BaseResponse):
    """Response of `/v1/chat/completions`."""

    prefix, whole_type, chunk_type = "chatcmpl", api.ChatCompletion, api.ChatChunk

    def __init__(self, job: Job, vocab: Vocabulary, model: str) -> None:
        super().__init__(job, vocab, model)
        readers = [ToolReader(job.in_call) if job.reads_tools else None for _ in self.speeds]
        self.states = [ChatState(reader) for reader in readers]

    def add(self, index: int, update: Update) -> tuple[str, list[api.ToolCallDelta]]:
        """Record an update. Returns its text and its tool calls."""
        super().add(index, update)
        state, done = self.states[index], update.completion
        text, found = update.text, list[api.FunctionCall]()
        if state.reader:
            text, found = state.reader.push(text, is_last=done is not None)
        calls = [api.ResponseToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=call) for call in found]
        deltas = [api.ToolCallDelta(index=len(state.calls) + i, **vars(call)) for i, call in enumerate(calls)]
        state.text += text
        state.calls += calls
        if done:
            is_cut = state.reader is not None and state.reader.is_cut and done.finish_reason == "length"
            state.finish = "tool_calls" if state.calls and not is_cut else done.finish_reason
        return text, deltas

    def _part(self, index: int, update: Update, is_traced: bool) -> api.ChatChunkChoice | None:
        """The first chunk has the role. It is sent with the first token: clients measure that time."""
        text, calls = self.add(index, update)
        state, entries = self.states[index], self._visible(update.logprobs)
        if not (text or calls or update.completion or is_traced or entries):
            return None
        content = text or (None if state.is_begun or state.calls else "")  # a completion without any text has ""
        delta = api.Delta(role=None if state.is_begun else "assistant", content=content, tool_calls=calls or None)
        state.is_begun = True
        logprobs = self._logprobs(entries) if entries else None
        return api.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=state.finish)

    def _choice(self, index: int, done: Completion) -> api.ChatChoice:
        state = self.states[index]
        assert state.finish is not None
        content = state.text or (None if state.calls else "")
        message = api.ResponseMessage(content=content, tool_calls=state.calls or None)
        logprobs = self._logprobs(self._visible(done.logprobs)) if self.job.shows_logprobs else None
        return api.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=state.finish)

    def _logprobs(self, entries: list[TokenLogprob]) -> api.ChatLogprobs:
        vocab = self.vocab
        content: list[api.ChatTokenLogprob] = [
            {**vocab.top(entry.token, entry.logprob), "top_logprobs": [vocab.top(*top) for top in entry.top]}
            for entry in entries
        ]
        return api.ChatLogprobs.model_construct(content=content)


class TextResponse(BaseResponse):
    """Response of `/v1/completions`."""

    prefix, whole_type, chunk_type = "cmpl", api.TextCompletion, api.TextCompletion

    def __init__(self, job: Job, vocab: Vocabulary, model: str) -> None:
        super().__init__(job, vocab, model)
        self.offsets = [TextOffsets() for _ in self.speeds]

    def _part(self, index: int, update: Update, is_traced: bool) -> api.TextChoice | None:
        self.add(index, update)
        finish = update.completion.finish_reason if update.completion else None
        logprobs = self._logprobs(update.logprobs, self.offsets[index])
        if not (update.text or finish or is_traced or logprobs):
            return None
        return api.TextChoice(index=index, text=update.text, logprobs=logprobs, finish_reason=finish)

    def _choice(self, index: int, done: Completion) -> api.TextChoice:
        logprobs = self._logprobs(done.logprobs, TextOffsets())
        return api.TextChoice(index=index, text=done.text, logprobs=logprobs, finish_reason=done.finish_reason)

    def _logprobs(self, entries: list[TokenLogprob] | None, offsets: TextOffsets) -> api.TextLogprobs | None:
        if not self.job.shows_logprobs:
            return None
        entries, vocab = self._visible(entries), self.vocab
        return api.TextLogprobs(
            tokens=[vocab.shown(entry.token)[0] for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[{vocab.shown(token)[0]: logprob for token, logprob in entry.top} for entry in entries],
            text_offset=[offsets.next(vocab.raw(entry.token)) for entry in entries],
        )


AnyResponse = ChatResponse | TextResponse
