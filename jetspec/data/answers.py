"""Questions of an evaluation, and the target's greedy answers to them: written once, then decoded again by any head."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from jetspec.data.corpus import Document, answer_spans, lines_of, parse
from jetspec.data.prompts import DATA_ENDINGS, BadPrompt, Prompt, PromptData
from jetspec.files import write_whole
from jetspec.types import Completion, SamplingParams


class ChatTokenizer(Protocol):
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...


class Generator(Protocol):
    """What decodes for real."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, progress: bool = False
    ) -> list[Completion]: ...


def find_tasks(folder: Path, names: Sequence[str] | None) -> dict[str, Path]:
    """The files FOLDER/NAME.jsonl, or else .jsonl.gz; without names, all of them."""
    files = [path for path in sorted(folder.glob("*.jsonl*"), reverse=True) if path.name.endswith(DATA_ENDINGS)]
    found = {path.name.partition(".jsonl")[0]: path for path in files}
    if not found:
        raise ValueError(f"{folder} holds no .jsonl files of questions")
    for name in names or ():
        if name not in found:
            raise ValueError(f"there is no task {name!r} in {folder}; it has {', '.join(sorted(found))}")
    return {name: found[name] for name in names or sorted(found)}


def read_questions(path: Path, limit: int | None) -> list[Prompt]:
    """The first prompts of a file or folder, or all of them.

    One that cannot be used is an error: results must be about the same questions.
    """
    prompts = []
    for prompt in PromptData((path,), limit=limit):
        if isinstance(prompt, BadPrompt):
            raise ValueError(f"{prompt.where} {prompt.reason}")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no questions")
    return prompts


def fingerprint(model: nn.Module) -> str:
    """Tells apart models of one name: a digest of a few numbers from every parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()[:64]
        digest.update(f"{name} {some.dtype}".encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Answerer:
    """The target, decoding plainly through its chat template."""

    llm: Generator
    tokenizer: ChatTokenizer
    fingerprint: str
    """Of the target: its answers are interchangeable with those of another of the same."""
    max_prompt_tokens: int
    vocab_size: int
    max_tokens: int
    progress: bool = False

    def answers(self, task: str, questions: Sequence[Prompt], cache: Path | None) -> list[Document]:
        """A document per answered turn, from the folder `cache` if they are there, and into it if not."""
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
        """Refuse a conversation whose first turn does not fit the context: results must be about the same questions."""
        for q in questions:
            length = len(self.tokenizer.encode_chat([*_system(q), _asks(q.turns[0])]))
            if length > self.max_prompt_tokens:
                raise ValueError(f"{q.where} has a question of {length} tokens; at most {self.max_prompt_tokens} fit")

    def _write(self, questions: Sequence[Prompt]) -> list[dict[str, Any]]:
        """All conversations together, turn by turn. A later turn that outgrows the context ends its conversation."""
        rows: list[dict[str, Any]] = []
        chats = [(q, _system(q)) for q in questions]
        for turn in range(max(len(q.turns) for q in questions)):
            chats = [(q, chat) for q, chat in chats if turn < len(q.turns)]
            for q, chat in chats:
                chat.append(_asks(q.turns[turn]))
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
        """Names everything that the answers depend on."""
        asked = [(q.id, q.system, q.turns) for q in questions]
        settings = [self.fingerprint, self.max_prompt_tokens, self.max_tokens]
        return hashlib.sha256(json.dumps([settings, asked]).encode()).hexdigest()[:12]


def _system(q: Prompt) -> list[dict[str, str]]:
    """What a conversation begins with."""
    return [{"role": "system", "content": q.system}] if q.system else []


def _asks(turn: str) -> dict[str, str]:
    return {"role": "user", "content": turn}


@dataclass(frozen=True)
class Decoded:
    """What decoding for real gave."""

    tokens_per_round: float
    tokens_per_s: float
    """All prompts together, prefill included."""
    same_frac: float
    """Share of answers that are those of the documents, token for token. All of them, in float32."""


def decode(llm: Generator, documents: Sequence[Document], max_tokens: int, progress: bool = False) -> Decoded:
    """Write the answers of `documents` again, greedily."""
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
