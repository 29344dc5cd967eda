"""What decodes: the engine in its settings, behind the interface that outside contenders share."""

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
from jetspec.engine.sizes import batch_sizes
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_folder import nested_head
from jetspec.models.hub import HUGGING_FACE_ID, head_path, resolve
from jetspec.profile.timing import without_capture
from jetspec.types import SamplingParams

PREFILL_CHUNK = 65_536
"""Enough for the prompts of a group in one piece, so that nobody decodes while another is prefilled."""


class Unequal(ValueError):
    """Two methods were not asked the same, or did not stop by the same rules: their numbers mean nothing together."""


@dataclass(frozen=True)
class Ask:
    """One turn of one question."""

    messages: Sequence[dict[str, str]]
    """The conversation so far, for those who apply the chat template themselves."""
    prompt: list[int]
    """The same as token ids."""
    sampling: SamplingParams
    turn: int = 0


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    """With the end token, where there is one to see."""
    text: str
    finish: str
    num_tokens: int
    """What speed counts: written tokens."""
    accepted: list[int] | None
    """Draft tokens kept, per round. None: nobody can tell."""
    num_read: int
    """Tokens of the prompt, as whoever decoded counted them."""
    other_prompt: bool = False
    """Whether it answers another prompt: a server that cut up its own earlier words in another way."""


@dataclass(frozen=True)
class Timed:
    """What became of a group of asks that were decoded together. A reply that is text is an error."""

    replies: list[Reply | str]
    prefill_s: float
    """Until every prompt was read."""
    decode_s: float
    """From then to the last token of the last reply."""


def split_time(
    began: float, prefilled: float, ended: float, written: int, answers: int, early: int
) -> tuple[float, float]:
    """Seconds of prefill and of decoding.

    One token per answer may come with the prefill. `early` more of them did: they are paid for out of its time as the
    rest was. Where there is no rest, all of the time is that of decoding.
    """
    whole, decode, rest = ended - began, ended - prefilled, written - answers - early
    if early:
        decode = min(whole, decode * (rest + early) / rest) if rest > 0 else whole
    return whole - decode, decode


class Method(Protocol):
    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Decode a little, so that nothing is compiled or captured later on."""

    def decode(self, asks: Sequence[Ask]) -> Timed:
        """Answer these together."""


class EngineMethod:
    """A setting of our engine."""

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
    """A method that could not be made ready: whatever it is asked fails for the same reason."""

    def __init__(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # which would keep what was made before it failed

    def warm_up(self, asks: Sequence[Ask]) -> None:
        """There is nothing to warm up."""

    def decode(self, asks: Sequence[Ask]) -> Timed:
        raise self.error


def with_head_of(llm: LLM, method: MethodConfig) -> LLM:
    """The target with the head that a method drafts with; as it is for a method without one."""
    if method.traits.head is None:
        return llm
    found = llm if method.head is None else llm.with_head(method.head)
    check_head(method, found.head)
    return found


def check_found(method: MethodConfig, is_new: bool) -> None:
    """Refuse a method whose head, package or server is not there, before a target is loaded.

    The server of a run that holds rows already may have done its work and be gone.
    """
    if method.head is not None:
        find_head(method.head)
    elif not method.is_ours and (is_new or method.url is None):
        from benchmarks import contenders

        contenders.check_ready(method)


def find_head(head: str) -> None:
    """Refuse a folder or name that no head can be had by."""
    try:
        problem = None if (resolve(head_path(head)) / "config.json").is_file() else "it has no config.json"
    except ValueError as error:
        problem = str(error) if re.fullmatch(HUGGING_FACE_ID, head) else "there is no such folder"
    if problem is not None:
        advice = nested_head(Path(head)) or "train it first, as the lines at the top of the recipe say"
        raise ValueError(f"no head in {head}: {problem}; {advice}")


def check_ready(llm: LLM, method: MethodConfig) -> None:
    """Refuse a method that could not be opened, before hours are spent on the others."""
    if method.is_ours:
        with_head_of(llm, method)
        return
    from benchmarks import contenders

    contenders.check_ready(method)
    if method.url is None:
        contenders.check_files(method, llm.target.path)


def open_method(
    llm: LLM, method: MethodConfig, budget: int | None, batch: int, max_len: int, **variables: Any
) -> Method:
    """A method made ready for one budget and batch size. `variables` are those of the chat template, for servers."""
    if method.is_ours:
        assert budget is not None
        return EngineMethod(open_engine(llm, method, budget, batch, max_len))
    from benchmarks import contenders, servers

    if method.url is not None:
        return servers.ServerMethod(llm.tokenizer, method.url, method.served_model, variables)
    return contenders.TransformersMethod(llm.target, max_len, method.assistant, contenders.lookup_tokens(method))


def open_engine(llm: LLM, method: MethodConfig, budget: int, batch: int, max_len: int) -> LLM:
    """The prefix cache is off: a question that comes again in the next repeat is to be read again."""
    config = EngineConfig(max_batch=batch, max_len=max_len, prefill_chunk=PREFILL_CHUNK, prefix_cache=False)
    opened = llm.with_drafter(method.traits.drafter, method.tree(budget), engine=config)
    if opened.engine.max_len < max_len:
        raise ValueError(f"{method.name}: no room for {batch} texts of {max_len} tokens; choose a smaller batch")
    return opened


def check_head(method: MethodConfig, head: object | None) -> None:
    """A result must not stand under the name of another head."""
    if head is None:
        raise ValueError(f"{method.name} needs a head: name it as {method.name}=FOLDER, or with `head` in the recipe")
    if (found := kind_of(head)) != method.traits.head:
        whose = "the model's own head" if method.head is None else method.head
        raise ValueError(f"{method.name} needs a head of kind {method.traits.head}, and {whose} is of kind {found}")


def kind_of(head: object) -> HeadKind:
    if not isinstance(head, DraftHead):
        return "eagle3"
    if not head.head_config.causal:
        return "bidirectional"
    return "edge" if head.edge is not None else "causal"
