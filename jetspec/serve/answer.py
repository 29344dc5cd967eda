"""From the engine's updates to what the client reads: one object at the end, or chunks on the way."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from jetspec.models.tokenizer import Tokenizer
from jetspec.serve.prepare import Prepared
from jetspec.serve.protocol import (
    AnswerMessage,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Finish,
    FunctionCall,
    MadeCall,
    Rounds,
    TextChoice,
    TextCompletion,
    TracedRound,
    TracedToken,
    TracedTree,
    Usage,
)
from jetspec.serve.tools import ToolReader
from jetspec.types import Completion, RoundTrace, Update

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

    def follow(self, update: Update, now: float) -> float:
        """Tokens per second up to this update. The clock starts with the first round, so that one has no speed."""
        self.rounds += 1
        self.began_s = now if self.began_s is None else self.began_s
        speed = self.tokens / (now - self.began_s) if now > self.began_s else 0.0
        self.tokens += len(update.token_ids)
        return speed


class Answer(Protocol):
    """The answers to one HTTP request, as they grow."""

    completions: dict[int, Completion]

    def start(self) -> list[Chunk]:
        """Chunks that come before anything is written."""

    def take(self, index: int, update: Update) -> Chunk | None:
        """Note what is new of an answer; a chunk, if it shows."""

    def whole(self) -> Whole:
        """Everything that was taken."""

    def bill(self) -> Chunk:
        """The chunk that says what it cost."""


@dataclass
class ChatState:
    """One answer of a chat."""

    reader: ToolReader | None
    said: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    finish: Finish | None = None
    trail: Trail = field(default_factory=Trail)


class ChatAnswer:
    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, model: str) -> None:
        self.tokenizer = tokenizer
        self.head = Heading.make("chatcmpl", model)
        self.states = [ChatState(ToolReader() if prepared.reads_tools else None) for _ in prepared.jobs]
        self.completions: dict[int, Completion] = {}

    def start(self) -> list[Chunk]:
        delta = Delta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index=i, delta=delta)]) for i in range(len(self.states))]

    def take(self, index: int, update: Update) -> Chunk | None:
        state = self.states[index]
        text, calls = update.text, list[FunctionCall]()
        if state.reader:
            text, calls = state.reader.push(text, is_last=update.completion is not None)
        made = [
            MadeCall(index=len(state.calls) + i, id=f"call_{uuid.uuid4().hex[:24]}", function=call)
            for i, call in enumerate(calls)
        ]
        state.said += text
        state.calls += made
        if update.completion:
            self.completions[index] = update.completion
            state.finish = "tool_calls" if state.calls else update.completion.finish_reason
        traced = trace_round(update, self.tokenizer, state.trail)
        if not (text or made or update.completion or traced):
            return None
        delta = Delta(content=text or None, tool_calls=made or None)
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=state.finish)
        return self._chunk([choice], jetspec=traced)

    def whole(self) -> ChatCompletion:
        choices = []
        for index, state in enumerate(self.states):
            assert state.finish is not None
            message = AnswerMessage(content=state.said or (None if state.calls else ""), tool_calls=state.calls or None)
            choices.append(ChatChoice(index=index, message=message, finish_reason=state.finish))
        usage = count_usage(self.completions)
        return ChatCompletion(**vars(self.head), choices=choices, usage=usage)

    def bill(self) -> Chunk:
        return self._chunk([], usage=count_usage(self.completions))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, jetspec: TracedRound | None = None
    ) -> ChatChunk:
        return ChatChunk(**vars(self.head), choices=choices, usage=usage, jetspec=jetspec)


class TextAnswer:
    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, model: str) -> None:
        self.tokenizer = tokenizer
        self.head = Heading.make("cmpl", model)
        self.trails = [Trail() for _ in prepared.jobs]
        self.completions: dict[int, Completion] = {}

    def start(self) -> list[Chunk]:
        return []

    def take(self, index: int, update: Update) -> Chunk | None:
        finish = None
        if update.completion:
            self.completions[index] = update.completion
            finish = update.completion.finish_reason
        traced = trace_round(update, self.tokenizer, self.trails[index])
        if not (update.text or finish or traced):
            return None
        choice = TextChoice(index=index, text=update.text, finish_reason=finish)
        return TextCompletion(**vars(self.head), choices=[choice], jetspec=traced)

    def whole(self) -> TextCompletion:
        choices = [
            TextChoice(index=index, text=done.text, finish_reason=done.finish_reason)
            for index, done in sorted(self.completions.items())
        ]
        return TextCompletion(**vars(self.head), choices=choices, usage=count_usage(self.completions))

    def bill(self) -> Chunk:
        return TextCompletion(**vars(self.head), choices=[], usage=count_usage(self.completions))


def count_usage(completions: dict[int, Completion]) -> Usage:
    """All answers together. Those to the same prompt share it, but each has read it, so each is counted."""
    stats = [done.stats for done in completions.values()]
    prompt, written = sum(s.prompt_tokens for s in stats), sum(s.completion_tokens for s in stats)
    rounds = sum(s.rounds for s in stats)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(s.cached_tokens for s in stats)),
        jetspec=Rounds(rounds=rounds, tokens_per_round=written / max(rounds, 1)),
    )


def trace_round(update: Update, tokenizer: Tokenizer, trail: Trail) -> TracedRound | None:
    """What the playground draws."""
    if update.trace is None:
        return None
    speed = trail.follow(update, time.perf_counter())
    return TracedRound(
        round=trail.rounds,
        tokens=traced_tokens(update, update.trace, tokenizer),
        tree=TracedTree(
            tokens=[tokenizer.token_text(token) for token in update.trace.tokens],
            parents=update.trace.parents,
            scores=update.trace.scores,
            path=update.trace.path,
            bonus=tokenizer.token_text(update.trace.bonus),
        ),
        tokens_per_s=speed,
    )


def traced_tokens(update: Update, trace: RoundTrace, tokenizer: Tokenizer) -> list[TracedToken]:
    tokens = []
    for depth, token in enumerate(update.token_ids, 1):
        node = trace.path[depth] if depth < len(trace.path) else None
        draft = None if node is None else trace.scores[node] - trace.scores[trace.parents[node]]
        text = tokenizer.token_bytes(token).decode(errors="replace")
        tokens.append(TracedToken(text=text, depth=depth, draft_logprob=draft))
    return tokens
