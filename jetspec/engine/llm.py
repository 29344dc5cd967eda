"""The Python API: text in, text out."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import torch

from jetspec.config import BatchTree, DrafterName, EngineConfig, TreeConfig
from jetspec.engine.engine import Engine, check_drafter
from jetspec.gc_control import freeze_objects
from jetspec.grammar.constraint import Grammars
from jetspec.interrupt import uninterrupted
from jetspec.models.decoder import Decoder
from jetspec.models.heads import Head, choose_head, load_any_head
from jetspec.models.hub import AUTO, DEFAULT_MODEL
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import Target, load_target
from jetspec.progress import progress_bar
from jetspec.types import Completion, SamplingParams, Update

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, str]]
K = TypeVar("K")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CPU_TREE = TreeConfig(budget=16, shortlist_parents=0)
"""Default tree on a CPU, where every node costs time."""
GPU_TREE = TreeConfig(ngrams=False, batch_trees=(BatchTree(8, 32), BatchTree(24, 16, depth=8)))
"""Default trees on a GPU, where nodes are almost free in a small batch only. No record says yet what n-grams cost and
bring there."""


class LLM:
    """A target model with a drafter.

        llm = LLM()                                     # SmolLM2-135M-Instruct
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

    The output is the target's, whatever the drafter: exactly in float32, up to near ties in 16 bits.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        head: str | Path | None = None,
        *,
        drafter: DrafterName | None = None,
        tree: TreeConfig | None = None,
        engine: EngineConfig | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        """Loads a model. `head` None: the best known one on this machine; "auto": the best known one, downloaded if
        needed; a line on stderr says which one and why. `drafter` None: the head, or `ngram` without one. `dtype` auto:
        float32 on a CPU, bfloat16 on a GPU. `device` auto: a GPU if there is one."""
        place = choose_device(device)
        target = load_target(model, choose_dtype(dtype, place), place)
        name = head
        if drafter not in (None, "head"):
            name = head = None
        elif head in (None, AUTO):
            choice = choose_head(model, target.decoder.config, fetch=head == AUTO)
            name, head = choice.name, choice.folder
            ending = "; drafts are n-grams" if drafter is None and head is None else ""
            print(choice.reason + ending, *choice.hints, sep="\n", file=sys.stderr)
        self.head_name = None if name is None else str(name)
        loaded = None if head is None else _load_head(head, target.decoder)
        self._start(target, loaded, drafter, tree, engine or EngineConfig())

    def _start(
        self,
        target: Target,
        head: Head | None,
        drafter: DrafterName | None,
        tree: TreeConfig | None,
        config: EngineConfig,
    ) -> None:
        self.target, self.head, self.config = target, head, config
        self._kept: list[Update] = []
        vocab_size, ends = target.decoder.config.vocab_size, target.eos_tokens
        self._grammars = cache(lambda: Grammars(target.tokenizer.token_bytes(), vocab_size, ends))
        self.drafter: DrafterName = drafter or ("head" if head else "ngram")
        on_cpu = target.decoder.embedding.device.type == "cpu"
        self.tree = tree or (CPU_TREE if on_cpu else GPU_TREE)
        if self.drafter == "head" and head and self.tree.depth:
            reach = head.head_config.draft_depth(self.tree.depth)
            if reach < self.tree.depth:
                raise ValueError(f"depth is {self.tree.depth}, but this head drafts {reach} positions")
        check_drafter(self.drafter, head, self.tree)

    @cached_property
    def engine(self) -> Engine:
        """The engine, created on first use because it allocates the KV cache."""
        grammars = self._grammars  # a reference to self would be a cycle
        return Engine(
            self.target.decoder,
            self.head,
            drafter=self.drafter,
            tree=self.tree,
            config=self.config,
            eos_tokens=self.target.eos_tokens,
            decode=self.tokenizer.decode,
            constrain=lambda grammar: grammars().start(grammar),
        )

    @property
    def grammars(self) -> Grammars:
        """The grammar compiler, created on first use because it reads the whole vocabulary."""
        return self._grammars()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.target.tokenizer

    @property
    def model_name(self) -> str:
        return self.target.name

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: one token of the context is left for the completion."""
        return self.engine.max_len - 1

    def with_drafter(
        self, drafter: DrafterName | None, tree: TreeConfig | None = None, *, engine: EngineConfig | None = None
    ) -> LLM:
        """Returns an LLM with the same weights and another drafter, tree or engine configuration."""
        return self._with(self.head, drafter, tree or self.tree, engine or self.config)

    def with_head(self, head: str | Path) -> LLM:
        """Returns an LLM with the same target and another head."""
        other = self._with(_load_head(head, self.target.decoder), None, self.tree, self.config)
        other.head_name = str(head)
        return other

    def _with(self, head: Head | None, drafter: DrafterName | None, tree: TreeConfig, config: EngineConfig) -> LLM:
        other = object.__new__(type(self))
        other.head_name = self.head_name
        other._start(self.target, head, drafter, tree, config)
        return other

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continues raw prompts (text or token ids) as one batch. Returns completions in order."""
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        params = self._params(sampling, len(many))
        jobs = zip(range(len(many)), [self._encode(prompt) for prompt in many], params, strict=True)
        done: dict[int, Completion] = {}
        with (
            progress_bar(total=len(many), desc="generating", unit="prompt", disable=not progress) as bar,
            closing(self._run(jobs, len(many), quiet=True)) as results,
        ):
            for index, update in results:
                if (ended := update.completion) and not params[index].stop:
                    ended = replace(ended, text=self.tokenizer.decode(ended.token_ids))
                if ended:
                    done[index] = ended
                    bar.update()
        return [done[index] for index in range(len(many))]

    def complete(
        self, prompts: Iterable[tuple[K, Sequence[int], SamplingParams] | None]
    ) -> Iterator[tuple[K, Completion]]:
        """Continues token ids, for any number of prompts. Yields completions as they finish, without text.

        Prompts are pulled as the engine needs them. An iterable yields None while it has no prompt until another
        completion is consumed. `max_tokens` is clipped to the context.
        """
        clipped = (prompt and (*prompt[:2], self.engine.clip(prompt[2])) for prompt in prompts)
        with closing(self._run(clipped, self.config.max_batch, quiet=True)) as results:
            yield from ((key, update.completion) for key, update in results if update.completion)

    def _run(
        self,
        prompts: Iterable[tuple[K, Sequence[int], SamplingParams] | None],
        most: int,
        *,
        quiet: bool = False,
        trace: bool = False,
    ) -> Generator[tuple[K, Update]]:
        """Yields the updates of prompts, at most `most` of which are in the engine at a time."""
        source, engine = iter(prompts), self.engine
        keys: dict[int, K] = {}
        try:
            with freeze_objects(most):
                while True:
                    while len(keys) < most and (prompt := next(source, None)) is not None:
                        key, tokens, sampling = prompt
                        with uninterrupted():
                            keys[engine.add(tokens, sampling, quiet=quiet, trace=trace)] = key
                    if not keys:
                        return
                    for update in self._updates(keys):
                        yield keys.pop(update.request_id) if update.completion else keys[update.request_id], update
        finally:
            self._drop(keys)

    def chat(self, messages: Messages, sampling: SamplingParams | None = None) -> Completion:
        """Answers a conversation through the model's chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], sampling)[0]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, trace: bool = False
    ) -> Iterator[Update]:
        """Yields one update per round; the last one has the completion. `trace` adds the tree of each round."""
        job = (0, self._encode(prompt), sampling or SamplingParams())
        with closing(self._run([job], 1, trace=trace)) as results:
            yield from (update for _, update in results)

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, *, trace: bool = False
    ) -> Iterator[Update]:
        """`stream` for a conversation."""
        return self.stream(self.tokenizer.encode_chat(messages), sampling, trace=trace)

    def _updates(self, ids: Collection[int]) -> list[Update]:
        """Returns new updates of these requests. Updates of other requests in the same steps are kept for them."""
        if not any(update.request_id in ids for update in self._kept):
            assert self.engine.has_work, "every request ends with a completion"
            self.engine.work()
        with uninterrupted():
            kept = [*self._kept, *self.engine.take()]
            self._kept = [update for update in kept if update.request_id not in ids]
        return [update for update in kept if update.request_id in ids]

    @uninterrupted()
    def _drop(self, ids: Collection[int]) -> None:
        """Cancels requests that have not ended, and drops their updates."""
        for request_id in ids:
            self.engine.cancel(request_id)
        self._kept = [update for update in self._kept if update.request_id not in ids]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    @staticmethod
    def _params(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * count
        if len(sampling) != count:
            raise ValueError(f"{count} prompts but {len(sampling)} sampling settings")
        return list(sampling)


def _load_head(head: str | Path, target: Decoder) -> Head:
    return load_any_head(head, target.config, dtype=target.embedding.dtype, device=target.embedding.device)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"unknown device {name!r}; use auto, cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name}, but no such GPU is usable here; use cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
