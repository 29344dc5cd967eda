"""The interface of a method, and our engine behind it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.recipe import HeadKind, MethodConfig
from jetspec.config import EngineConfig
from jetspec.engine.llm import LLM
from jetspec.engine.runner import batch_sizes
from jetspec.models.head_folder import nested_head
from jetspec.models.hub import HUGGING_FACE_ID, head_path, resolve
from jetspec.profile.timing import without_capture
from jetspec.types import SamplingParams

PREFILL_CHUNK = 65_536
"""Enough for the prompts of a group in one piece, so that no request decodes while another is prefilled."""


class UnequalConditions(ValueError):
    """Two methods were not asked the same, or did not stop by the same rules: they cannot be compared."""


@dataclass(frozen=True)
class Ask:
    messages: Sequence[dict[str, str]]
    """Conversation so far, for methods that apply the chat template themselves."""
    prompt: list[int]
    """The same as token ids."""
    sampling: SamplingParams
    turn: int = 0


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    """With the end token, where it is visible."""
    text: str
    finish: str
    num_tokens: int
    """Written tokens, which speed counts."""
    accepted: list[int] | None
    """Draft tokens accepted per round. None: not known."""
    num_read: int
    """Tokens of the prompt, as the method counted them."""
    other_prompt: bool = False
    """It answers another prompt: a server that tokenized its own earlier answer differently."""


@dataclass(frozen=True)
class Timed:
    """Replies of a group decoded together, with times. A reply that is text is an error."""

    replies: list[Reply | str]
    prefill_s: float
    """Seconds until every prompt was read."""
    decode_s: float
    """Seconds from then to the last token of the last reply."""


def split_time(
    began: float, prefilled: float, ended: float, written: int, answers: int, early: int
) -> tuple[float, float]:
    """Seconds of prefill and of decoding.

    One token per answer may come with the prefill. `early` more of them did: their share of the time counts as decoding
    at the rate of the rest. Without a rest, all of the time is that of decoding.
    """
    whole, decode, rest = ended - began, ended - prefilled, written - answers - early
    if early:
        decode = min(whole, decode * (rest + early) / rest) if rest > 0 else whole
    return whole - decode, decode


class Method(Protocol):
    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Compile and capture what decoding these needs."""
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        """Answer these together."""


class EngineMethod:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Batches shrink as answers end, and a graph serves one size."""
        engine = self.llm.engine
        sizes = batch_sizes(len(asks), engine.drafter.tree.batch_trees) if engine.uses_graphs else [len(asks)]
        for size in sizes:
            self._decode([replace(ask, sampling=replace(ask.sampling, ignore_eos=True)) for ask in asks[:size]])

    def decode(self, asks: Sequence[Ask]) -> Timed:
        return without_capture(self.llm.engine.graphs, lambda: self._decode(asks))

    def _decode(self, asks: Sequence[Ask]) -> Timed:
        began = time.perf_counter()
        done = dict(self.llm.complete((i, ask.prompt, ask.sampling) for i, ask in enumerate(asks)))
        seconds = time.perf_counter() - began
        prefill_s = max(completion.stats.prefill_s for completion in done.values())
        replies: list[Reply | str] = []
        for i in range(len(asks)):
            ids, stats = done[i].token_ids, done[i].stats
            text = self.llm.tokenizer.decode(ids)
            finish, num_read = done[i].finish_reason, stats.prompt_tokens
            replies.append(Reply(ids, text, finish, len(ids), stats.accepted_lengths, num_read))
        return Timed(replies, prefill_s, seconds - prefill_s)


class Unopened:
    """A method that could not be opened: every request fails for the same reason."""

    def __init__(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # which would keep what was made before it failed

    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Nothing."""

    def decode(self, asks: Sequence[Ask]) -> Timed:
        raise self.error


def with_head_of(llm: LLM, method: MethodConfig) -> LLM:
    """The target with the head of a method, if that is of its kind; unchanged for a method without one."""
    if method.traits.head is None:
        return llm
    found = llm if method.head is None else llm.with_head(method.head)
    if found.head is None:
        raise ValueError(f"{method.name} needs a head: name it as {method.name}=FOLDER, or with `head` in the recipe")
    if (kind := kind_of(found.head)) != method.traits.head != "any":
        whose = "the model's own head" if method.head is None else method.head
        raise ValueError(f"{method.name} needs a head of kind {method.traits.head}, and {whose} is of kind {kind}")
    return found


def find_head(head: str) -> None:
    """Refuse a folder or name without a head."""
    try:
        problem = None if (resolve(head_path(head)) / "config.json").is_file() else "it has no config.json"
    except ValueError as error:
        problem = str(error) if re.fullmatch(HUGGING_FACE_ID, head) else "there is no such folder"
    if problem is not None:
        advice = nested_head(Path(head)) or "train it first, as the lines at the top of the recipe say"
        raise ValueError(f"no head in {head}: {problem}; {advice}")


def open_engine(llm: LLM, method: MethodConfig, budget: int, batch: int, max_len: int) -> LLM:
    """Engine of a method, without prefix cache: a question of the next repeat is read again."""
    config = EngineConfig(max_batch=batch, max_len=max_len, prefill_chunk=PREFILL_CHUNK, prefix_cache=False)
    opened = llm.with_drafter(method.traits.drafter, method.tree(budget), engine=config)
    if opened.engine.max_len < max_len:
        raise ValueError(f"{method.name}: no memory for {batch} texts of {max_len} tokens; choose a smaller batch")
    return opened


def kind_of(head: Any) -> HeadKind:
    config = head.head_config
    if config.kind == "eagle3":
        return "eagle3"
    return "bidirectional" if not config.causal else "edge" if config.edge else "causal"
