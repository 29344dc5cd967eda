"""Questions of an evaluation, and the target's greedy answers to them, cached and shared by all heads."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from jetspec.data.conversation import system_messages, user_message
from jetspec.data.corpus import Document, answer_spans, lines_of, parse
from jetspec.data.prompts import Prompt
from jetspec.files import write_whole
from jetspec.types import Completion, SamplingParams


class ChatTokenizer(Protocol):
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...


class Generator(Protocol):
    """A decoder of prompts, such as an `LLM`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, progress: bool = False
    ) -> list[Completion]: ...


def fingerprint(model: nn.Module) -> str:
    """A digest of a few numbers from every parameter. It differs between models of one name."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()[:64]
        digest.update(f"{name} {some.dtype}".encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Answerer:
    """The target with its chat template, decoding without speculation."""

    llm: Generator
    tokenizer: ChatTokenizer
    fingerprint: str
    """Of the target. Targets with the same one share their answers."""
    max_prompt_tokens: int
    vocab_size: int
    max_tokens: int
    progress: bool = False

    @classmethod
    def of(cls, llm: Any, max_tokens: int, progress: bool = False) -> Answerer:
        """The target of an `LLM`, which decodes without a drafter."""
        decoder = llm.target.decoder
        digest, vocab_size = fingerprint(decoder), decoder.config.vocab_size
        return cls(llm, llm.tokenizer, digest, llm.max_prompt_tokens, vocab_size, max_tokens, progress)

    def answers(self, task: str, questions: Sequence[Prompt], cache: Path | None) -> list[Document]:
        """One document per answered turn, read from the folder `cache`, or computed and written to it."""
        path = cache / f"{task}-{self._digest(questions)}.jsonl" if cache else None
        if path is not None and path.exists():
            return [parse(line, f"{path}:{number}", self.vocab_size) for number, line in lines_of(path)]
        self.check(questions)
        lines = [json.dumps(row) for row in self._write(questions)]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(f"{line}\n" for line in lines))
        return [parse(line, task, self.vocab_size) for line in lines]

    def check(self, questions: Sequence[Prompt]) -> None:
        """Refuses conversations whose first turn does not fit the context."""
        for q in questions:
            length = len(self.tokenizer.encode_chat([*system_messages(q.system), user_message(q.turns[0])]))
            if length > self.max_prompt_tokens:
                raise ValueError(f"{q.where} has a question of {length} tokens; at most {self.max_prompt_tokens} fit")

    def _write(self, questions: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Answers all conversations together, turn by turn. One that outgrows the context ends there."""
        rows: list[dict[str, Any]] = []
        chats = [(q, system_messages(q.system)) for q in questions]
        for turn in range(max(len(q.turns) for q in questions)):
            chats = [(q, chat) for q, chat in chats if turn < len(q.turns)]
            for q, chat in chats:
                chat.append(user_message(q.turns[turn]))
            asked = [(q, chat, self.tokenizer.encode_chat(chat)) for q, chat in chats]
            asked = [(q, chat, prompt) for q, chat, prompt in asked if len(prompt) <= self.max_prompt_tokens]
            sampling = SamplingParams(max_tokens=self.max_tokens)
            done = self.llm.generate([prompt for _, _, prompt in asked], sampling, progress=self.progress)
            for (q, chat, prompt), completion in zip(asked, done, strict=True):
                chat.append({"role": "assistant", "content": completion.text})
                tokens = [*prompt, *completion.token_ids]
                rows.append({"id": f"{q.id}/{turn}", "token_ids": tokens, "spans": [[len(prompt), len(tokens)]]})
            chats = [(q, chat) for q, chat, _ in asked]
        return rows

    def _digest(self, questions: Sequence[Prompt]) -> str:
        """A digest of everything that the answers depend on."""
        asked = [(q.id, q.system, q.turns) for q in questions]
        settings = [self.fingerprint, self.max_prompt_tokens, self.max_tokens]
        return hashlib.sha256(json.dumps([settings, asked]).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Decoded:
    """Measurements of decoding with a drafter."""

    tokens_per_round: float
    tokens_per_s: float
    """Throughput over all prompts, prefill included."""
    same_frac: float
    """Share of answers equal to those of the documents, token for token. In float32 all are."""


def decode(llm: Generator, documents: Sequence[Document], max_tokens: int, progress: bool = False) -> Decoded:
    """Decodes the answers of `documents` again, greedily."""
    prompts, answers = [], []
    for document in documents:
        for start, end in answer_spans(document):
            prompts.append(document.tokens[:start].tolist())
            answers.append(document.tokens[start:end].tolist())
    began = time.perf_counter()
    done = llm.generate(prompts, SamplingParams(max_tokens=max_tokens), progress=progress)
    seconds = time.perf_counter() - began
    num_tokens = sum(completion.stats.completion_tokens for completion in done)
    return Decoded(
        tokens_per_round=num_tokens / sum(completion.stats.rounds for completion in done),
        tokens_per_s=num_tokens / seconds,
        same_frac=sum(c.token_ids == answer for c, answer in zip(done, answers, strict=True)) / len(done),
    )
