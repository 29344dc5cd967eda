"""Synthesizes prompts with the target: given the start of a user's turn, a chat model continues it like a user.

A row is one line of JSON, {"id": "invented-s0-000123", "turns": ["..."]}, in the format of `PromptData`. The id holds
the seed, so that files of several seeds can be answered together, and the number of the attempt. Each attempt has its
own prefix and seed; attempts without a usable prompt leave gaps in the numbers. Rows are written in the order of the
attempts, so a file depends only on the settings (in 16 bits up to near ties), a shorter file is the start of a longer
one, and a killed run resumes behind the last row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any, Literal, Protocol

from jetspec.data.config import ID_START, SynthesizeConfig
from jetspec.data.conversation import PLACEHOLDER, require_template, system_messages
from jetspec.data.prompts import Prompt, stable_hash
from jetspec.data.rows import JobFile, Row, RunTally
from jetspec.data.workers import Answer, Results, answer_all, in_processes
from jetspec.models.tokenizer import Tokenizer
from jetspec.progress import progress_bar
from jetspec.record import shown
from jetspec.types import Completion, SamplingParams

Drop = Literal["unfinished", "garbled", "empty", "short", "repeated"]
"""Reason to drop an attempt: no end within the limit; control tokens or half a character in the text; nothing written;
fewer than `MIN_WORDS`; a text that the file holds already."""

MIN_WORDS = 2
GIVE_UP = 500
"""Attempts in a row without a new prompt that end a run."""
SAMPLE = f'{PLACEHOLDER}Aa "<&>"\n\\{PLACEHOLDER}'
"""Stands for the user's text in a rendered turn: characters that a template might change, between two marks."""


# -- a turn


class Writer(Protocol):
    """A generator that continues turns, such as an `LLM`."""

    def complete(
        self, prompts: Iterable[tuple[Row, Sequence[int], SamplingParams] | None]
    ) -> Iterator[tuple[Row, Completion]]: ...


class UserTurn:
    """The text around a user's message in a chat template, and the tokens that end it."""

    def __init__(self, tokenizer: Tokenizer, eos_tokens: frozenset[int], system: str | None = None) -> None:
        require_template(tokenizer)
        self.tokenizer = tokenizer
        self.before, after = around_user_text(tokenizer, system)
        end_mark = after.strip().partition("\n")[0]
        first = frozenset(tokenizer.encode(end_mark)[:1])
        is_control = not tokenizer.decode([*first])
        self.end_tokens = eos_tokens | first if is_control else eos_tokens
        self.stop = () if is_control else (end_mark,)
        """End of the turn as text, in templates without control tokens."""

    def encode_start(self, prefix: str) -> list[int]:
        """A turn up to the end of its prefix, encoded as one text. A trailing space is dropped: it is the first
        character of the next word."""
        return self.tokenizer.encode(self.before + prefix if prefix else self.before.rstrip(" "))

    def written(self, row: Row) -> str | None:
        """The text that the target wrote, without the end of the turn; None if it is not all text."""
        ((start, _),) = row.spans
        ids = row.token_ids[:-1] if row.token_ids[-1] in self.end_tokens else row.token_ids

        def text(skip_special: bool) -> str:
            given = self.tokenizer.decode(ids[:start], skip_special)
            return self.tokenizer.decode(ids, skip_special)[len(given) :]

        found = text(skip_special=True)
        if found != text(skip_special=False):
            return None
        for mark in self.stop:
            found = found.partition(mark)[0]
        return None if "\ufffd" in found else found


def around_user_text(tokenizer: Tokenizer, system: str | None) -> tuple[str, str]:
    """Output of the chat template before and after the text of a first user message."""
    parts = tokenizer.chat([*system_messages(system), {"role": "user", "content": SAMPLE}]).split(SAMPLE)
    if len(parts) != 2:
        raise ValueError("the chat template does not contain the user's text unchanged and once; choose another model")
    return parts[0], parts[1]


def synthesize(writer: Writer, config: SynthesizeConfig, turn: UserTurn, attempts: Iterator[Prompt]) -> Results:
    """Rows of attempts whose turns the target completed. Each has one span: the tokens that it wrote."""

    def started() -> Iterator[tuple[Row, Sequence[int], SamplingParams]]:
        for attempt in attempts:
            tokens = turn.encode_start(attempt.turns[0])
            yield Row(attempt.id, tokens, [], []), tokens, config.sampling(attempt.id, turn.stop)

    for row, completion in writer.complete(started()):
        tokens = [*row.token_ids, *completion.token_ids]
        yield Row(row.id, tokens, [(len(row.token_ids), len(tokens))], [completion.finish_reason])


def read_attempt(turn: UserTurn, row: Row, prefix: str, seen: set[int]) -> tuple[str, Drop | None]:
    """The prompt of an attempt, and the reason to drop it, if any."""
    written = turn.written(row)
    text = f"{prefix}{written or ''}".strip()
    reasons: list[tuple[Drop, bool]] = [
        ("unfinished", row.finish == ["length"]),
        ("garbled", written is None),
        ("empty", not (written or "").strip()),
        ("short", len(text.split()) < MIN_WORDS),
        ("repeated", fingerprint(text) in seen),
    ]
    return text, next((reason for reason, holds in reasons if holds), None)


def fingerprint(text: str) -> int:
    """A hash that is equal for texts that differ in white space only."""
    return stable_hash(" ".join(text.split()))


# -- the file


class PromptFile(JobFile):
    """The output of `jetspec data synthesize`."""

    start = f'{{"id": "{ID_START}'

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_rows = self.next_attempt = 0
        self.seen: set[int] = set()
        """Fingerprints of the prompts."""
        super().__init__(*args, **options)

    def add(self, row: Mapping[str, Any]) -> None:
        number, (text,) = attempt_number(row["id"]), row["turns"]
        if number < self.next_attempt:
            raise ValueError("attempts are in order")
        self.seen.add(fingerprint(text))
        self.num_rows, self.next_attempt = self.num_rows + 1, number + 1


def attempt_number(id: str) -> int:
    found = re.fullmatch(rf"{ID_START}s-?\d+-(\d+)", id)
    if not found:
        raise ValueError(f"{id!r} is not the id of an attempt")
    return int(found[1])


# -- the whole run


@dataclass
class Tally(RunTally):
    """Counts of one run."""

    RECORDED = ("kept", "already", "dropped", "tokens", "seconds", "prompts_per_s")
    kept: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)
    since_last: int = 0
    """Attempts since the last new prompt."""

    @property
    def prompts_per_s(self) -> float:
        return self.per_second(self.kept)

    @property
    def reasons(self) -> str:
        return ", ".join(f"{number:,} {reason}" for reason, number in self.dropped.most_common())

    def add(self, row: Row, drop: Drop | None) -> None:
        self.count_tokens(row)
        if drop is None:
            self.kept, self.since_last = self.kept + 1, 0
            return
        self.dropped[drop] += 1
        self.since_last += 1
        if self.since_last >= GIVE_UP:
            raise ValueError(
                f"the last {GIVE_UP} attempts gave no new prompt (dropped: {self.reasons});"
                " try other prefixes, a higher --temperature or more --max-tokens"
            )

    def summary(self, out: Path) -> str:
        reasons = f" ({self.reasons})" if self.dropped else ""
        return (
            f"{self.kept:,} prompts synthesized, {self.already:,} already there,"
            f" {self.dropped.total():,} dropped{reasons} · {self.tokens:,} tokens in {self.seconds:.1f} s"
            f" · {self.prompts_per_s:,.1f} prompts/s -> {out}"
        )


def write_prompts(
    out: Path, count: int, config: SynthesizeConfig, turn: UserTurn, starts: Sequence[Callable[[], Answer]]
) -> Tally:
    """Synthesizes prompts until `out` holds `count` of them.

    Each of `starts` loads a writer, in a process of its own when there are several. The run is recorded in `out` +
    .meta.json.
    """
    with closing(PromptFile(out, _settings(config))) as file:
        tally, first = Tally(already=file.num_rows), file.next_attempt
        file.record()
        if tally.already >= count:
            return tally
        results = answer_all(starts, map(config.attempt, count_from(first)), tally)
        bar = progress_bar(total=count, initial=tally.already, desc="synthesizing", unit=" prompts")
        with bar, closing(results):
            for number, row in enumerate(in_order(results, first), first):
                text, drop = read_attempt(turn, row, config.attempt(number).turns[0], file.seen)
                if drop is None:
                    file.append({"id": row.id, "turns": [text]})
                    file.seen.add(fingerprint(text))
                    bar.update()
                tally.add(row, drop)
                bar.set_postfix_str(f"{tally.dropped.total():,} dropped", refresh=False)
                if tally.already + tally.kept == count:
                    break
        file.record(tally.entry(len(starts)))
    return tally


def in_order(results: Results, first: int) -> Iterator[Row]:
    """Rows in the order of their attempts, which count up from `first`. Early ones are held back."""
    waiting: dict[int, Row] = {}
    for row in results:
        assert isinstance(row, Row), "attempts are always well-formed prompts"
        waiting[attempt_number(row.id)] = row
        while first in waiting:
            yield waiting.pop(first)
            first += 1


def _settings(config: SynthesizeConfig) -> dict[str, Any]:
    """Settings in the format of the record, where prefixes are `openings`."""
    names = ("system", "max_tokens", "temperature", "top_p", "seed")
    settings = {name: getattr(config, name) for name in names}
    return {"model": shown(config.model), "openings": [*config.openings], **settings}


def plan(out: Path, count: int, config: SynthesizeConfig, turn: UserTurn, places: Sequence[str]) -> str:
    """A description of the run, made without loading the model."""
    already = PromptFile(out, _settings(config), writes=False).num_rows
    todo = max(0, count - already)
    return (
        f"would synthesize {todo:,} prompts with {config.model} ({already:,} already in {out})\n"
        f"after {turn.before!r}\n"
        f"with {len(config.openings):,} prefixes in turn, at most {config.max_tokens:,} tokens each\n"
        + in_processes(places)
    )
