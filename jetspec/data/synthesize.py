"""Synthesizes prompts with the target: given the start of a user's turn, a chat model continues it like a user.

A row is one line of JSON, {"id": "invented-s0-000123", "turns": ["..."]}, in the format of `PromptData`. The id holds
the seed, so that files of several seeds can be answered together, and the number of the attempt. Each attempt has its
own prefix and seed; attempts without a usable prompt leave gaps in the numbers. Rows are written in the order of the
attempts, so a file depends only on the settings (in 16 bits up to near ties), a shorter file is the start of a longer
one, and a killed run resumes behind the last row.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import count as count_from
from pathlib import Path
from typing import Any, Literal, Protocol

from jetspec.data.conversation import PLACEHOLDER, require_template, system_messages
from jetspec.data.prompts import Prompt, stable_hash
from jetspec.data.regenerate import in_processes
from jetspec.data.rows import LineFile, Row, RunTally, read_lines, record_of, resumable_runs
from jetspec.data.workers import Answer, Results, answer_all
from jetspec.files import read_text
from jetspec.models.tokenizer import Tokenizer
from jetspec.progress import progress_bar
from jetspec.record import shown, write_record
from jetspec.settings import read_settings
from jetspec.types import Completion, SamplingParams

Drop = Literal["unfinished", "garbled", "empty", "short", "repeated"]
"""Reason to drop an attempt: no end within the limit; control tokens or half a character in the text; nothing written;
fewer than `MIN_WORDS`; a text that the file holds already."""

BUILTIN_FILE = Path(__file__).with_name("prefixes.yaml")
MIN_WORDS = 2
GIVE_UP = 500
"""Attempts in a row without a new prompt that end a run."""
SAMPLE = f'{PLACEHOLDER}Aa "<&>"\n\\{PLACEHOLDER}'
"""Stands for the user's text in a rendered turn: characters that a template might change, between two marks."""
ID_START = "invented-"
"""Part of the file format, as is `invent/` in seeds: files of earlier releases resume with the same prompts."""
ROW_START = f'{{"id": "{ID_START}'
"""First characters of every row on disk."""
RUN_COUNTS = ("kept", "already", "dropped", "tokens", "seconds", "prompts_per_s")
"""Counts that the record of a run keeps."""


@dataclass(frozen=True)
class SynthesizeConfig:
    """Settings that determine the prompts."""

    model: str
    prefixes: tuple[str, ...] = ("",)
    """First words of the prompts, used in turn; after an empty one the target writes the whole prompt."""
    system: str | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def attempt(self, number: int) -> Prompt:
        """A prompt whose only turn is its prefix."""
        id = f"{ID_START}s{self.seed}-{number:06}"
        return Prompt(id, [self.prefixes[number % len(self.prefixes)]], [], self.system, id)

    def sampling(self, id: str, stop: tuple[str, ...] = ()) -> SamplingParams:
        """Sampling parameters of an attempt. Its seed differs from the one of its answer."""
        seed = stable_hash(f"invent/{self.seed}/{id}") >> 1
        return SamplingParams(self.temperature, self.top_p, max_tokens=self.max_tokens, seed=seed, stop=stop)


# -- prefixes


def builtin_prefixes() -> tuple[str, ...]:
    """Prefixes of all kinds in turn, so that any stretch is balanced. Every second one is empty: a free prompt."""
    kinds: dict[str, list[str]] = read_settings(BUILTIN_FILE)
    in_turn = [prefix for row in zip(*kinds.values(), strict=True) for prefix in row]
    return tuple(one for prefix in in_turn for one in (prefix, ""))


def read_prefixes(name: str) -> tuple[str, ...]:
    """The prefixes `builtin` or `none`, or those of a text file: one per line, an empty line for a free prompt."""
    if name == "builtin":
        return builtin_prefixes()
    if name == "none":
        return ("",)
    prefixes = tuple(read_text(Path(name)).splitlines())
    if not prefixes:
        raise ValueError(f"{name} holds no prefixes")
    return prefixes


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


class Content:
    """Content of the complete rows of a file, if it exists."""

    def __init__(self, path: Path) -> None:
        self.num_rows = self.next_attempt = 0
        self.seen: set[int] = set()
        """Fingerprints of the prompts."""
        self.end = read_lines(path, ROW_START, self.add)
        """End of the last row, in bytes."""

    def add(self, row: dict[str, Any]) -> None:
        number, (text,) = attempt_number(row["id"]), row["turns"]
        if number < self.next_attempt:
            raise ValueError("attempts are in order")
        self.seen.add(fingerprint(text))
        self.num_rows, self.next_attempt = self.num_rows + 1, number + 1


class PromptFile(LineFile):
    """The output of `jetspec data synthesize`."""

    def read(self) -> int:
        self.content = Content(self.path)
        return self.content.end


def attempt_number(id: str) -> int:
    found = re.fullmatch(rf"{ID_START}s-?\d+-(\d+)", id)
    if not found:
        raise ValueError(f"{id!r} is not the id of an attempt")
    return int(found[1])


# -- the whole run


@dataclass
class Tally(RunTally):
    """Counts of one run."""

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
    settings = _settings(config)
    with record_of(out) as meta, closing(PromptFile(out)) as file:
        runs = resumable_runs(meta, settings) if file.content.num_rows else []
        tally = Tally(already=file.content.num_rows)
        write_record(meta, {"settings": settings, "runs": runs})
        if tally.already < count:
            _synthesize_until(file, count, config, turn, starts, tally)
            write_record(meta, {"settings": settings, "runs": [*runs, tally.entry(RUN_COUNTS, len(starts))]})
    return tally


def _synthesize_until(
    file: PromptFile,
    count: int,
    config: SynthesizeConfig,
    turn: UserTurn,
    starts: Sequence[Callable[[], Answer]],
    tally: Tally,
) -> None:
    first, seen = file.content.next_attempt, file.content.seen
    results = answer_all(starts, map(config.attempt, count_from(first)), tally)
    bar = progress_bar(total=count, initial=tally.already, desc="synthesizing", unit=" prompts")
    with bar, closing(results):
        for number, row in enumerate(in_order(results, first), first):
            text, drop = read_attempt(turn, row, config.attempt(number).turns[0], seen)
            if drop is None:
                file.append({"id": row.id, "turns": [text]})
                seen.add(fingerprint(text))
                bar.update()
            tally.add(row, drop)
            bar.set_postfix_str(f"{tally.dropped.total():,} dropped", refresh=False)
            if tally.already + tally.kept == count:
                return


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
    settings: dict[str, Any] = json.loads(json.dumps(asdict(replace(config, model=shown(config.model)))))
    return {"openings" if name == "prefixes" else name: value for name, value in settings.items()}


def plan(out: Path, count: int, config: SynthesizeConfig, turn: UserTurn, places: Sequence[str]) -> str:
    """A description of the run, made without loading the model."""
    already = Content(out).num_rows
    if already:
        resumable_runs(out.with_name(f"{out.name}.meta.json"), _settings(config))
    todo = max(0, count - already)
    return (
        f"would synthesize {todo:,} prompts with {config.model} ({already:,} already in {out})\n"
        f"after {turn.before!r}\n"
        f"with {len(config.prefixes):,} prefixes in turn, at most {config.max_tokens:,} tokens each\n"
        + in_processes(places)
    )
