"""From the engine's updates to what the client reads: one object at the end, or chunks on the way."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jetspec.models.tokenizer import Tokenizer
from jetspec.serve.calls import ToolReader
from jetspec.serve.prepare import Prepared
from jetspec.serve.protocol import (
    AnswerMessage,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    Delta,
    Finish,
    FunctionCall,
    MadeCall,
    MadeCallDelta,
    Rounds,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TopLogprob,
    TracedRound,
    TracedToken,
    TracedTree,
    Usage,
)
from jetspec.serve.worker import Job
from jetspec.types import Completion, RoundTrace, TokenLogprob, Update

DONE = b"data: [DONE]\n\n"

Chunk = ChatChunk | TextCompletion
Whole = ChatCompletion | TextCompletion


def event(data: str) -> bytes:
    """One server-sent event. JSON has no line breaks of its own."""
    return f"data: {data}\n\n".encode()


@dataclass
class Heading:
    """What all chunks of an answer repeat."""

    id: str
    created: int
    model: str

    @classmethod
    def make(cls, prefix: str, model: str) -> Heading:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


@dataclass
class Trail:
    """Where one answer stands: for the tokens per second of its trace."""

    began_s: float | None = None
    rounds: int = 0
    tokens: int = 0
    """Without those of the first round."""

    def follow(self, update: Update, now: float) -> float:
        """Tokens per second up to this update. The clock starts when the first round is over, so it has no speed."""
        self.rounds += 1
        if self.began_s is None:
            self.began_s = now
            return 0.0
        self.tokens += len(update.token_ids)
        return self.tokens / (now - self.began_s) if now > self.began_s else 0.0


class Vocabulary:
    """What tokens look like, one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._shown: dict[int, tuple[str, list[int]]] = {}

    def raw(self, token: int) -> bytes:
        """What it adds to a text: nothing, if it is a control token."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def text(self, token: int) -> str:
        """Its own text, where a part of a character has none, and a control token its name."""
        return self.raw(token).decode(errors="replace") or self.label(token)

    def label(self, token: int) -> str:
        """One printable line."""
        return self._tokenizer.token_text(token)

    def shown(self, token: int) -> tuple[str, list[int]]:
        """Its text and its bytes, as answers hold them: up to twenty for every token written."""
        if token not in self._shown:
            self._shown[token] = self.text(token), list(self.raw(token))
        return self._shown[token]

    def top(self, token: int, logprob: float) -> TopLogprob:
        text, raw = self.shown(token)
        return {"token": text, "logprob": logprob, "bytes": raw}


def chat_logprobs(found: list[TokenLogprob], words: Vocabulary) -> ChatLogprobs:
    content: list[ChatTokenLogprob] = [
        {**words.top(entry.token, entry.logprob), "top_logprobs": [words.top(*top) for top in entry.top]}
        for entry in found
    ]
    return ChatLogprobs.model_construct(content=content)


class Offsets:
    """Where the tokens of a text begin, in characters. One inside a character begins where that does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, raw: bytes) -> int:
        if raw and raw[0] & 0xC0 != 0x80:  # it begins a character, so that one before it is over
            self._length += len(self._decoder.decode(b"", final=True))
        offset = self._length
        self._length += len(self._decoder.decode(raw))
        return offset


def text_logprobs(found: list[TokenLogprob], words: Vocabulary, offsets: Offsets) -> TextLogprobs:
    return TextLogprobs(
        tokens=[words.shown(entry.token)[0] for entry in found],
        token_logprobs=[entry.logprob for entry in found],
        top_logprobs=[{words.shown(token)[0]: logprob for token, logprob in entry.top} for entry in found],
        text_offset=[offsets.next(words.raw(entry.token)) for entry in found],
    )


class Answer(Protocol):
    """The answers to one HTTP request, as they grow."""

    completions: dict[int, Completion]

    def keep(self, index: int, update: Update) -> object:
        """Note what is new of an answer."""

    def take(self, index: int, update: Update) -> Chunk | None:
        """The same, and a chunk, if it shows."""

    def whole(self) -> Whole:
        """Everything that was taken."""

    def bill(self) -> Chunk:
        """The chunk that says what it cost."""


@dataclass
class ChatState:
    """One answer of a chat."""

    reader: ToolReader | None
    is_begun: bool = False
    """A chunk has named the role."""
    said: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    finish: Finish | None = None
    trail: Trail = field(default_factory=Trail)


class ChatAnswer:
    def __init__(self, prepared: Prepared, words: Vocabulary, model: str) -> None:
        self.words, self.jobs, self.shows_logprobs = words, prepared.jobs, prepared.shows_logprobs
        self.head = Heading.make("chatcmpl", model)
        self.states = [
            ChatState(ToolReader(prepared.in_call) if prepared.reads_tools else None)
            for _ in range(prepared.num_answers)
        ]
        self.completions: dict[int, Completion] = {}

    def keep(self, index: int, update: Update) -> tuple[str, list[MadeCallDelta]]:
        """What is said and what is called now."""
        state = self.states[index]
        text, calls = update.text, list[FunctionCall]()
        if state.reader:
            text, calls = state.reader.push(text, is_last=update.completion is not None)
        made = [MadeCall(id=f"call_{uuid.uuid4().hex[:24]}", function=call) for call in calls]
        shown = [MadeCallDelta(index=len(state.calls) + i, **vars(call)) for i, call in enumerate(made)]
        state.said += text
        state.calls += made
        if update.completion:
            self.completions[index] = update.completion
            state.finish = finish_of(state, update.completion)
        return text, shown

    def take(self, index: int, update: Update) -> Chunk | None:
        """The first chunk of an answer names the role; it comes when something is written, as clients measure that."""
        text, shown = self.keep(index, update)
        state, found = self.states[index], self._shown(update.logprobs)
        traced = trace_round(update, self.words, state.trail)
        if not (text or shown or update.completion or traced or found):
            return None
        content = text or (None if state.is_begun or state.calls else "")  # an answer that says nothing has a text
        delta = Delta(role=None if state.is_begun else "assistant", content=content, tool_calls=shown or None)
        state.is_begun = True
        logprobs = chat_logprobs(found, self.words) if found else None
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=state.finish)
        return self._chunk([choice], jetspec=traced)

    def whole(self) -> ChatCompletion:
        choices = []
        for index, state in enumerate(self.states):
            assert state.finish is not None
            message = AnswerMessage(content=state.said or (None if state.calls else ""), tool_calls=state.calls or None)
            found = self._shown(self.completions[index].logprobs)
            logprobs = chat_logprobs(found, self.words) if self.shows_logprobs else None
            choices.append(ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=state.finish))
        usage = count_usage(self.jobs, self.completions)
        return ChatCompletion(**vars(self.head), choices=choices, usage=usage)

    def bill(self) -> Chunk:
        return self._chunk([], usage=count_usage(self.jobs, self.completions))

    def _shown(self, logprobs: list[TokenLogprob] | None) -> list[TokenLogprob]:
        return written(logprobs or [], self.words) if self.shows_logprobs else []

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, jetspec: TracedRound | None = None
    ) -> ChatChunk:
        return ChatChunk(**vars(self.head), choices=choices, usage=usage, jetspec=jetspec)


def finish_of(state: ChatState, done: Completion) -> Finish:
    """Calls are why an answer ends, unless the limit on its length has cut one off."""
    is_cut = state.reader is not None and state.reader.is_cut and done.finish_reason == "length"
    return "tool_calls" if state.calls and not is_cut else done.finish_reason


def written(logprobs: list[TokenLogprob], words: Vocabulary) -> list[TokenLogprob]:
    """Without the tokens that add nothing to the text, such as the one that ends it."""
    return [entry for entry in logprobs if words.raw(entry.token)]


class TextAnswer:
    def __init__(self, prepared: Prepared, words: Vocabulary, model: str) -> None:
        self.words, self.jobs, self.shows_logprobs = words, prepared.jobs, prepared.shows_logprobs
        self.head = Heading.make("cmpl", model)
        self.trails = [Trail() for _ in range(prepared.num_answers)]
        self.offsets = [Offsets() for _ in range(prepared.num_answers)]
        self.completions: dict[int, Completion] = {}

    def keep(self, index: int, update: Update) -> None:
        if update.completion:
            self.completions[index] = update.completion

    def take(self, index: int, update: Update) -> Chunk | None:
        self.keep(index, update)
        finish = update.completion.finish_reason if update.completion else None
        logprobs = self._logprobs(update.logprobs, self.offsets[index])
        traced = trace_round(update, self.words, self.trails[index])
        if not (update.text or finish or traced or logprobs):
            return None
        choice = TextChoice(index=index, text=update.text, logprobs=logprobs, finish_reason=finish)
        return TextCompletion(**vars(self.head), choices=[choice], jetspec=traced)

    def whole(self) -> TextCompletion:
        choices = [
            TextChoice(
                index=index,
                text=done.text,
                logprobs=self._logprobs(done.logprobs, Offsets()),
                finish_reason=done.finish_reason,
            )
            for index, done in sorted(self.completions.items())
        ]
        return TextCompletion(**vars(self.head), choices=choices, usage=count_usage(self.jobs, self.completions))

    def bill(self) -> Chunk:
        return TextCompletion(**vars(self.head), choices=[], usage=count_usage(self.jobs, self.completions))

    def _logprobs(self, found: list[TokenLogprob] | None, offsets: Offsets) -> TextLogprobs | None:
        if not self.shows_logprobs:
            return None
        return text_logprobs(written(found or [], self.words), self.words, offsets)


def count_usage(jobs: Sequence[Job], completions: dict[int, Completion]) -> Usage:
    """All answers together. Those to the same prompt share it: it counts once, as it was for the first of them."""
    stats = [completions[index].stats for index in range(len(completions))]
    firsts = [stats[sum(job.count for job in jobs[:number])] for number in range(len(jobs))]
    prompt, written = sum(s.prompt_tokens for s in firsts), sum(s.completion_tokens for s in stats)
    rounds = sum(s.rounds for s in stats)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(s.cached_tokens for s in firsts)),
        jetspec=Rounds(rounds=rounds, tokens_per_round=written / max(rounds, 1)),
    )


def trace_round(update: Update, words: Vocabulary, trail: Trail) -> TracedRound | None:
    """What the playground draws."""
    if update.trace is None:
        return None
    speed = trail.follow(update, time.perf_counter())
    return TracedRound(
        round=trail.rounds,
        tokens=traced_tokens(update, update.trace, words),
        tree=TracedTree(
            tokens=[words.label(token) for token in update.trace.tokens],
            parents=update.trace.parents,
            scores=update.trace.scores,
            path=update.trace.path,
            bonus=words.label(update.trace.bonus),
        ),
        tokens_per_s=speed,
    )


def traced_tokens(update: Update, trace: RoundTrace, words: Vocabulary) -> list[TracedToken]:
    assert update.logprobs is not None, "who asks for traces gets log-probabilities"
    tokens = []
    for depth, entry in enumerate(update.logprobs, 1):
        draft = trace.logprobs[trace.path[depth]] if depth < len(trace.path) else None
        text = words.raw(entry.token).decode(errors="replace")
        tokens.append(TracedToken(text=text, depth=depth, logprob=entry.logprob, draft_logprob=draft))
    return tokens
