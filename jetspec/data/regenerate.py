"""Regenerates training data: the target answers prompts, and conversations are written as rows of token ids.

A row is one line of JSON: `token_ids` is the whole conversation, `spans` are the parts [start, end) that the target
wrote, end tokens included, and `finish` is the reason that ended each of them. A row depends only on its prompt and
the settings (in 16 bits up to near ties, which depend on the batch), not on order, shard or number of processes.

One process reads the prompts and writes the rows; workers only answer. So a run has one output file, and a killed run
resumes from the rows in it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jetspec.data.config import RegenerateConfig
from jetspec.data.conversation import (
    PLACEHOLDER,
    Conversation,
    assistant_message,
    require_template,
    start_conversation,
    user_message,
)
from jetspec.data.prompts import BadPrompt, CutPrompt, OnBad, Prompt, PromptData, parse_shard
from jetspec.data.rows import JobFile, Row, RunTally
from jetspec.data.workers import Answer, Results, answer_all, in_processes
from jetspec.models.hub import resolve
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import load_tokenizer, open_model
from jetspec.progress import print_above, progress_bar
from jetspec.record import shown
from jetspec.types import Completion, SamplingParams

WARM_UP_TOKENS, PROBE_TOKENS = 4, 64
"""Most tokens of an answer of a probe before the clock starts, and of a timed one."""


Check = Callable[[Prompt], "Conversation | BadPrompt"]
"""Checks a prompt before it is answered: returns its conversation, or the reason that it cannot be used."""


class Answerer(Protocol):
    """A generator of answers, such as an `LLM`."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_prompt_tokens(self) -> int: ...

    def complete(
        self, prompts: Iterable[tuple[Conversation, Sequence[int], SamplingParams] | None]
    ) -> Iterator[tuple[Conversation, Completion]]: ...


# -- answering


def regenerate(answerer: Answerer, config: RegenerateConfig, prompts: Iterator[Prompt]) -> Results:
    """Rows of prompts whose turns the target answered. A conversation that fills the context ends there, with a
    `CutPrompt` before its row."""
    require_template(answerer.tokenizer)
    ready: deque[Conversation] = deque()
    bad: deque[BadPrompt] = deque()
    under_way = 0

    def questions() -> Iterator[tuple[Conversation, Sequence[int], SamplingParams] | None]:
        nonlocal under_way
        for prompt in prompts:
            while ready:
                yield ask(ready.popleft())
            conversation = start_conversation(prompt, answerer.tokenizer, answerer.max_prompt_tokens)
            if isinstance(conversation, BadPrompt):
                bad.append(conversation)
            else:
                under_way += 1
                yield ask(conversation)
        while under_way:
            yield ask(ready.popleft()) if ready else None

    def ask(conversation: Conversation) -> tuple[Conversation, Sequence[int], SamplingParams]:
        return conversation, conversation.token_ids, config.sampling(conversation.prompt.id)

    for conversation, completion in answerer.complete(questions()):
        conversation.answer(completion.token_ids, completion.finish_reason)
        if conversation.has_next_turn:
            token_ids = conversation.with_next_turn()
            if len(token_ids) <= answerer.max_prompt_tokens:
                conversation.token_ids = token_ids
                ready.append(conversation)
                continue
            prompt = conversation.prompt
            yield CutPrompt(prompt.where, len(conversation.spans), len(prompt.turns))
        under_way -= 1
        yield conversation.row
        while bad:
            yield bad.popleft()
    yield from bad


class Corpus:
    """Answers from the data, unchanged, each followed by the end token of the chat template."""

    def __init__(self, tokenizer: Tokenizer, eos_tokens: frozenset[int], max_len: int) -> None:
        require_template(tokenizer)
        self.tokenizer, self.max_len = tokenizer, max_len
        ended = [user_message("."), assistant_message(PLACEHOLDER)]
        behind = tokenizer.encode_behind(PLACEHOLDER, ended, add_generation_prompt=False)
        self.end = [token for token in behind[:1] if token in eos_tokens]

    def converse(self, prompt: Prompt) -> Conversation | BadPrompt:
        conversation = start_conversation(prompt, self.tokenizer, self.max_len)
        if isinstance(conversation, BadPrompt):
            return conversation
        for response in prompt.responses:
            if conversation.spans:
                conversation.token_ids = conversation.with_next_turn()
            if len(words := self.tokenizer.encode_words(response)) < 2:
                return BadPrompt(prompt.where, f"has a response of one token ({response!r})")
            conversation.answer([*words, *self.end], "stop")
        if (count := len(conversation.token_ids)) > self.max_len:
            return BadPrompt(prompt.where, f"is longer than the context ({count} tokens, {self.max_len} fit)")
        return conversation

    def answer(self, prompts: Iterator[Prompt]) -> Results:
        for conversation in map(self.converse, prompts):
            yield conversation if isinstance(conversation, BadPrompt) else conversation.row


# -- the whole run


class RowFile(JobFile):
    """The output of `jetspec data regenerate`."""

    start = '{"id": '

    def __init__(self, *args: Any, **options: Any) -> None:
        self.ids: set[str] = set()
        super().__init__(*args, **options)

    def add(self, row: Mapping[str, Any]) -> None:
        if not {"id", "token_ids", "spans"} <= row.keys():
            raise ValueError("keys are missing")
        self.ids.add(row["id"])


@dataclass
class Tally(RunTally):
    """Counts of one run."""

    RECORDED = ("answered", "already", "skipped", "cut", "tokens", "seconds", "tokens_per_s")
    on_bad: OnBad = "stop"
    todo: int = 0
    skipped: int = 0
    unusable: set[str] = field(default_factory=set)
    """Ids of well-formed prompts that cannot be used, such as those longer than the context."""
    prompt_tokens: int = 0
    answered: int = 0
    cut: int = 0
    """Prompts answered, but not to the last turn."""

    @property
    def tokens_per_s(self) -> float:
        return self.per_second(self.tokens)

    def refuse(self, bad: BadPrompt) -> None:
        if self.on_bad == "stop":
            raise ValueError(f"{bad.where}: {bad.reason}; fix it, or use --set prompts.on_bad=skip")
        self.skipped += 1
        print_above(f"skipped {bad.where}: {bad.reason}", file=sys.stderr)

    def summary(self, out: Path) -> str:
        cut = f" ({self.cut:,} of them not to the last turn)" if self.cut else ""
        written = out if self.answered + self.already else f"nothing is written to {out}"
        return (
            f"{self.answered:,} prompts answered{cut}, {self.already:,} already there, {self.skipped:,} skipped"
            f" · {self.tokens:,} tokens in {self.seconds:.1f} s · {self.tokens_per_s:,.0f} tokens/s -> {written}"
        )


def write_rows(
    out: Path, data: PromptData, config: RegenerateConfig, check: Check, starts: Sequence[Callable[[], Answer]]
) -> Tally:
    """Answers every prompt without a row in `out`, and appends the rows to it.

    Each of `starts` loads an answerer, in a process of its own when there are several. The run is recorded in `out` +
    .meta.json.
    """
    shard = list(parse_shard(data.shard))
    about = {"data": [shown(source) for source in data.sources], "limit": data.limit, "shard": shard}
    with closing(RowFile(out, _settings(config))) as rows:
        tally = count(data, rows.ids, check)
        rows.record(**about)
        if tally.todo:
            try:
                _answer(rows, _unanswered(data, rows.ids | tally.unusable), starts, tally)
            except KeyboardInterrupt:
                done, wanted = tally.already + tally.answered, tally.already + tally.todo
                state = f"{done:,} of {wanted:,} prompts are answered in {out}"
                print(f"stopped: {state}; the same command resumes there", file=sys.stderr)
                raise
            rows.record(tally.entry(len(starts)), **about)
    return tally


def count(data: PromptData, done: set[str], check: Check) -> Tally:
    """Checks all prompts before the first is answered, so that bad ones are reported at once."""
    tally = Tally(on_bad=data.on_bad)
    with progress_bar(data, desc="checking", unit=" prompts", leave=False) as bar:
        for prompt in bar:
            if isinstance(prompt, BadPrompt):
                tally.refuse(prompt)
            elif prompt.id in done:
                tally.already += 1
            elif isinstance(begun := check(prompt), BadPrompt):
                tally.refuse(begun)
                tally.unusable.add(prompt.id)
            else:
                tally.todo += 1
                tally.prompt_tokens += len(begun.token_ids) - begun.row.num_written
    return tally


def _unanswered(data: PromptData, without: set[str]) -> Iterator[Prompt]:
    return (prompt for prompt in data if isinstance(prompt, Prompt) and prompt.id not in without)


def _answer(rows: RowFile, prompts: Iterator[Prompt], starts: Sequence[Callable[[], Answer]], tally: Tally) -> None:
    results = answer_all(starts, prompts, tally)
    with progress_bar(total=tally.todo, desc="answering", unit=" prompts") as bar, closing(results):
        for result in results:
            if isinstance(result, CutPrompt):
                tally.cut += 1
                left = f"the context is full after {result.answered} of {result.turns} turns; the rest is left out"
                print_above(f"cut {result.where}: {left}", file=sys.stderr)
                continue
            if isinstance(result, BadPrompt):
                tally.refuse(result)
            else:
                rows.append(vars(result))
                tally.answered += 1
                tally.count_tokens(result)
                bar.set_postfix_str(f"{tally.tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update()


def _settings(config: RegenerateConfig) -> dict[str, Any]:
    """Settings that the rows depend on. Those of sampling do not count where the answers come from the data."""
    settings = {**vars(config), "model": shown(config.model)}
    names = settings if config.responses == "target" else ("model", "responses", "max_len")
    return {name: settings[name] for name in names}


def plan(
    out: Path, data: PromptData, config: RegenerateConfig, check: Check, places: Sequence[str]
) -> tuple[str, list[Prompt]]:
    """A description of the run, made without loading the model, and the prompts that it would answer."""
    done = RowFile(out, _settings(config), writes=False).ids
    tally = count(data, done, check)
    todo = list(_unanswered(data, done | tally.unusable))
    most = config.max_tokens * sum(len(prompt.turns) for prompt in todo)
    asked, written = " before the first answers", f"at most {most:,} to generate"
    if config.responses == "corpus":
        asked, written = "", "responses taken from the data"
    description = (
        f"would answer {tally.todo:,} prompts with {config.model}"
        f" ({tally.already:,} already in {out}, {tally.skipped:,} bad)\n"
        f"{tally.prompt_tokens:,} prompt tokens{asked}, {written}\n" + in_processes(places)
    )
    return description, todo


def read_tokenizer(model: str) -> tuple[Tokenizer, frozenset[int], int]:
    """A model's tokenizer, end tokens and context length, without its weights."""
    opened = open_model(resolve(model))
    return *load_tokenizer(opened), opened.config.max_len


def load_check(config: RegenerateConfig) -> Check:
    """The check of `responses="target"`, made without the weights: the context must leave space for one token."""
    tokenizer, _, longest = read_tokenizer(config.model)
    require_template(tokenizer)
    return partial(start_conversation, tokenizer=tokenizer, max_prompt_tokens=config.longest(longest) - 1)


# -- the time that it takes


def time_needed(
    answerer: Answerer, config: RegenerateConfig, todo: Sequence[Prompt], batch: int, devices: int
) -> tuple[float, str] | None:
    """Estimated seconds for all answers and the grounds of the estimate, from the beginnings of a full batch of
    answers, spread evenly over the prompts. None if no prompt of the batch can be answered."""
    some = list(todo[:: max(1, len(todo) // batch)][:batch])

    def answers(most: int) -> list[Row]:
        short = replace(config, max_tokens=min(most, config.max_tokens))
        return [row for row in regenerate(answerer, short, iter(some)) if isinstance(row, Row)]

    answers(WARM_UP_TOKENS)
    began = time.perf_counter()
    rows = answers(PROBE_TOKENS)
    speed = sum(row.num_written for row in rows) / (time.perf_counter() - began)
    if not speed:
        return None
    each = expected_tokens(rows, config.max_tokens)
    grounds = f"the beginnings of answers to {len(rows)} prompts: {speed:,.0f} tokens/s, {each:,.0f} tokens per answer"
    return sum(len(prompt.turns) for prompt in todo) * each / (speed * devices), grounds


def expected_tokens(begun: Sequence[Row], most: int) -> float:
    """Expected tokens of an answer of at most `most`, with the same probability to end at every token as in `begun`."""
    chance = sum(row.finish.count("stop") for row in begun) / sum(row.num_written for row in begun)
    return (1 - (1 - chance) ** most) / chance if chance else most
