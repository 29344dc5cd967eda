"""An LLM for tests of the command line, with few imports for subprocesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from jetspec.config import EngineConfig, TreeConfig
from jetspec.types import Completion, RoundStats, RoundTrace, SamplingParams, Update

WORDS = ["The", " sky", " is", " blue", " because", " air", " scatters", " light", ".\n"]
ANSWER = "".join(WORDS)


class FakeLLM:
    """Answers every prompt with WORDS: one per round when plain, three per round otherwise."""

    model_name = "fake"
    dtype = torch.float32
    drifts = False
    """True: the speculative text differs from the plain one in its third token."""
    failure: BaseException | None = None
    """Raised in place of the third word."""
    asked: ClassVar[list[Any]] = []
    trees: ClassVar[list[TreeConfig | None]] = []
    """Prompts of all streams, and trees of all `with_drafter` calls."""
    made: ClassVar[list[dict[str, Any]]] = []
    sampled: ClassVar[list[SamplingParams]] = []
    """Arguments of every load, and parameters of every stream."""

    def __init__(
        self,
        model: str = "fake",
        head: str | None = None,
        *,
        drafter: str | None = None,
        tree: TreeConfig | None = None,
        engine: EngineConfig | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        self.made.append({"model": model, "head": head, "engine": engine, "dtype": dtype, "device": device})
        self.drafter, self.head_name = drafter or "ngram", head
        self.tree = tree or TreeConfig(budget=16)
        self.tokenizer = SimpleNamespace(token_text=WORDS.__getitem__)
        self.target = SimpleNamespace(decoder=SimpleNamespace(embedding=SimpleNamespace(dtype=self.dtype)))

    def with_drafter(self, drafter: str, tree: TreeConfig | None = None) -> FakeLLM:
        self.trees.append(tree)
        other = copy(self)
        other.drafter, other.tree = drafter, tree or self.tree
        return other

    def generate(self, prompt: Any, sampling: SamplingParams) -> list[Completion]:
        return [update.completion for update in self.stream(prompt, sampling) if update.completion]

    def chat(self, messages: Any, sampling: SamplingParams) -> Completion:
        return self.generate(messages, sampling)[0]

    def stream_chat(
        self, messages: Sequence[dict[str, str]], sampling: SamplingParams, *, trace: bool = False
    ) -> Iterator[Update]:
        return self.stream(messages, sampling, trace=trace)

    def stream(self, prompt: Any, sampling: SamplingParams, *, trace: bool = False) -> Iterator[Update]:
        self.asked.append(prompt)
        self.sampled.append(sampling)
        tokens = list(range(len(WORDS)))[: sampling.max_tokens]
        if self.drifts and self.drafter != "none":
            tokens[2] = 0
        step = 1 if self.drafter == "none" else 3
        stats = RoundStats(prompt_tokens=4, prefill_s=0.5)
        for start in range(0, len(tokens), step):
            if self.failure and start >= 2:
                raise self.failure
            kept = tokens[start : start + step]
            stats.accepted_lengths.append(len(kept) - 1)
            stats.decode_s += 0.1
            done = start + step >= len(tokens)
            completion = Completion("".join(WORDS[t] for t in tokens), tokens, "stop", stats) if done else None
            drawing = RoundTrace([0, 1, 2, 3], [0, 0, 1, 0], [0.0, -0.5, -0.75, -2.0], [0, 1, 2], 4)
            yield Update(0, kept, "".join(WORDS[t] for t in kept), completion, drawing if trace else None)
