"""The target writes prompts: given only the beginning of a user's turn, a chat model continues it as a user would.

A row is one line of JSON, {"id": "invented-s0-000123", "turns": ["..."]}: what `PromptData` reads. The id tells the
seed, so that files of several seeds can be answered together, and the number of the attempt. Each attempt has its own
opening and seed; those that bring no usable prompt leave gaps in the numbers. Rows are written in the order of the
attempts, so a file follows from the settings alone (in 16 bits up to near ties), a longer file begins with the shorter
one, and a run that was killed goes on behind the last row.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import count as count_from
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from tqdm import tqdm

from jetspec.data.prompts import Prompt, stable_hash
from jetspec.data.regenerate import PLACEHOLDER, require_template
from jetspec.data.rows import LineFile, Row, earlier_runs, record_of
from jetspec.data.workers import Answer, Results, answer_in_processes
from jetspec.models.tokenizer import Tokenizer
from jetspec.record import shown, write_record
from jetspec.types import Completion, SamplingParams

Drop = Literal["unfinished", "garbled", "empty", "short", "repeated"]
"""Why an attempt brings no prompt: no end within the limit; control tokens or half a character in the text; nothing
written; fewer than `MIN_WORDS`; a text that is there already."""

MIN_WORDS = 2
GIVE_UP = 500
"""Attempts in a row without a new prompt after which there is no hope of more."""
SAMPLE = f'{PLACEHOLDER}Aa "<&>"\n\\{PLACEHOLDER}'
"""Stands for the user's text in a rendered turn: characters that a template might change, between two it cannot."""
ID_START = "invented-"


@dataclass(frozen=True)
class InventConfig:
    """What decides the prompts."""

    model: str
    openings: tuple[str, ...] = ("",)
    """First words of the prompts, by turns; an empty one leaves the choice to the target."""
    system: str | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def attempt(self, number: int) -> Prompt:
        """A prompt whose one turn is only begun."""
        id = f"{ID_START}s{self.seed}-{number:06}"
        return Prompt(id, [self.openings[number % len(self.openings)]], [], self.system, id)

    def sampling(self, id: str, stop: tuple[str, ...] = ()) -> SamplingParams:
        """Every attempt has its own seed, and not the one that its answer is sampled with."""
        seed = stable_hash(f"invent/{self.seed}/{id}") >> 1
        return SamplingParams(self.temperature, self.top_p, max_tokens=self.max_tokens, seed=seed, stop=stop)


class Writer(Protocol):
    """What continues turns, such as an `LLM`."""

    def complete(
        self, prompts: Iterable[tuple[Row, Sequence[int], SamplingParams] | None]
    ) -> Iterator[tuple[Row, Completion]]: ...


# -- a turn


class UserTurn:
    """Where a chat template puts the user's text, and what ends it there."""

    def __init__(self, tokenizer: Tokenizer, eos_tokens: frozenset[int], system: str | None = None) -> None:
        require_template(tokenizer)
        self.tokenizer = tokenizer
        self.before, behind = around_user_text(tokenizer, system)
        end_mark = behind.strip().partition("\n")[0]
        first = frozenset(tokenizer.encode(end_mark)[:1])
        is_control = not tokenizer.decode([*first])
        self.end_tokens = eos_tokens | first if is_control else eos_tokens
        self.stop = () if is_control else (end_mark,)
        """Templates without control tokens end the turn with a text."""

    def begin(self, opening: str) -> list[int]:
        """A turn up to its opening, encoded as one text. A last space is left to the target: it belongs to a word."""
        return self.tokenizer.encode(self.before + opening if opening else self.before.rstrip(" "))

    def written(self, row: Row) -> str | None:
        """What the target wrote, without what ended it; None if that is not all text."""
        ((start, _),) = row.spans
        ids = row.token_ids[:-1] if row.token_ids[-1] in self.end_tokens else row.token_ids

        def text(skip_special: bool) -> str:
            begun = self.tokenizer.decode(ids[:start], skip_special)
            return self.tokenizer.decode(ids, skip_special)[len(begun) :]

        found = text(skip_special=True)
        if found != text(skip_special=False):
            return None
        for mark in self.stop:
            found = found.partition(mark)[0]
        return None if "\ufffd" in found else found


def around_user_text(tokenizer: Tokenizer, system: str | None) -> tuple[str, str]:
    """What the chat template writes before and behind the text of a first user message."""
    messages = [{"role": "system", "content": system}] if system else []
    parts = tokenizer.chat([*messages, {"role": "user", "content": SAMPLE}]).split(SAMPLE)
    if len(parts) != 2:
        raise ValueError("the chat template does not show the user's text as it is, once; choose another model")
    return parts[0], parts[1]


def invent(writer: Writer, config: InventConfig, turn: UserTurn, attempts: Iterator[Prompt]) -> Results:
    """Let the target finish turns. The row of an attempt has one span: what was written."""

    def begun() -> Iterator[tuple[Row, Sequence[int], SamplingParams]]:
        for attempt in attempts:
            tokens = turn.begin(attempt.turns[0])
            yield Row(attempt.id, tokens, [], []), tokens, config.sampling(attempt.id, turn.stop)

    for row, completion in writer.complete(begun()):
        tokens = [*row.token_ids, *completion.token_ids]
        yield Row(row.id, tokens, [(len(row.token_ids), len(tokens))], [completion.finish_reason])


def judge(turn: UserTurn, row: Row, opening: str, seen: set[int]) -> tuple[str, Drop | None]:
    """The prompt that an attempt brought, and what speaks against it."""
    written = turn.written(row)
    text = f"{opening}{written or ''}".strip()
    reasons: list[tuple[Drop, bool]] = [
        ("unfinished", row.finish == ["length"]),
        ("garbled", written is None),
        ("empty", not (written or "").strip()),
        ("short", len(text.split()) < MIN_WORDS),
        ("repeated", fingerprint(text) in seen),
    ]
    return text, next((reason for reason, holds in reasons if holds), None)


def fingerprint(text: str) -> int:
    """Equal for texts that differ in white space only."""
    return stable_hash(" ".join(text.split()))


# -- the file


class PromptFile(LineFile):
    """Prompts on disk."""

    def read(self) -> int:
        self.held = _read(self.file)
        return self.held.end

    def append(self, id: str, text: str) -> None:
        self.write({"id": id, "turns": [text]})


@dataclass
class Held:
    """What the whole rows of a file tell."""

    num_rows: int = 0
    next_attempt: int = 0
    end: int = 0
    """Where the last of them ends, in bytes."""
    seen: set[int] = field(default_factory=set)


def read_held(path: Path) -> Held:
    """What is in a file, which need not exist."""
    if not path.is_file():
        return Held()
    with path.open("rb") as file:
        return _read(file)


def _read(file: BinaryIO) -> Held:
    """A file that holds anything but prompts of this command, in order, is refused."""
    held = Held()
    row_start = f'{{"id": "{ID_START}'.encode()
    file.seek(0)
    for line in file:
        try:
            if not line.endswith(b"\n"):
                if line[: len(row_start)] != row_start[: len(line)]:
                    raise ValueError
                break
            row = json.loads(line)
            number, (text,) = attempt_number(row["id"]), row["turns"]
            if number < held.next_attempt:
                raise ValueError
            held.seen.add(fingerprint(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            where = f"{file.name}:{held.num_rows + 1}"
            raise ValueError(f"{where}: is not a prompt of this command; choose another --out") from None
        held.num_rows, held.next_attempt, held.end = held.num_rows + 1, number + 1, held.end + len(line)
    return held


def attempt_number(id: str) -> int:
    found = re.fullmatch(rf"{ID_START}s-?\d+-(\d+)", id)
    if not found:
        raise ValueError(f"{id!r} names no attempt")
    return int(found[1])


# -- the whole run


@dataclass
class Tally:
    """What became of the attempts of one run."""

    already: int
    kept: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)
    tokens: int = 0
    in_vain: int = 0
    """Attempts since the last new prompt."""
    began: float = 0.0
    seconds: float = 0.0

    @property
    def prompts_per_s(self) -> float:
        return self.kept / self.seconds if self.seconds else 0.0

    @property
    def reasons(self) -> str:
        return ", ".join(f"{number:,} {reason}" for reason, number in self.dropped.most_common())

    def add(self, row: Row, drop: Drop | None) -> None:
        self.tokens += row.num_written
        self.seconds = time.monotonic() - self.began
        if drop is None:
            self.kept, self.in_vain = self.kept + 1, 0
            return
        self.dropped[drop] += 1
        self.in_vain += 1
        if self.in_vain >= GIVE_UP:
            raise ValueError(
                f"the last {GIVE_UP} attempts brought no new prompt (dropped: {self.reasons});"
                " try other openings, a higher --temperature or more --max-tokens"
            )

    def summary(self, out: Path) -> str:
        reasons = f" ({self.reasons})" if self.dropped else ""
        return (
            f"{self.kept:,} prompts invented, {self.already:,} already there, {self.dropped.total():,} dropped{reasons}"
            f" · {self.tokens:,} tokens in {self.seconds:.1f} s · {self.prompts_per_s:,.1f} prompts/s -> {out}"
        )


def write_prompts(
    out: Path, count: int, config: InventConfig, turn: UserTurn, starts: Sequence[Callable[[], Answer]]
) -> Tally:
    """Invent prompts until `out` holds `count` of them.

    Each of `starts` loads what writes, in a process of its own when there are several. What was run is recorded in
    `out` + .meta.json.
    """
    with record_of(out) as meta, closing(PromptFile(out)) as file:
        runs = _earlier_runs(meta, config) if file.held.num_rows else []
        tally = Tally(already=file.held.num_rows)
        write_record(meta, {"settings": _settings(config), "runs": runs})
        if tally.already < count:
            _invent_until(file, count, config, turn, starts, tally)
            write_record(meta, {"settings": _settings(config), "runs": [*runs, _run_entry(tally, len(starts))]})
    return tally


def _invent_until(
    file: PromptFile,
    count: int,
    config: InventConfig,
    turn: UserTurn,
    starts: Sequence[Callable[[], Answer]],
    tally: Tally,
) -> None:
    first, seen = file.held.next_attempt, file.held.seen

    def attempts() -> Iterator[Prompt]:
        tally.began = time.monotonic()  # the models are loaded when the first attempt is asked for
        yield from map(config.attempt, count_from(first))

    interval = 0.5 if sys.stderr.isatty() else 30
    results = starts[0]()(attempts()) if len(starts) == 1 else answer_in_processes(starts, attempts())
    bar = tqdm(total=count, initial=tally.already, desc="inventing", unit=" prompts", mininterval=interval)
    with bar, closing(results):
        for number, row in enumerate(in_order(results, first), first):
            text, drop = judge(turn, row, config.attempt(number).turns[0], seen)
            if drop is None:
                file.append(row.id, text)
                seen.add(fingerprint(text))
                bar.update()
            tally.add(row, drop)
            bar.set_postfix_str(f"{tally.dropped.total():,} dropped", refresh=False)
            if tally.already + tally.kept == count:
                return


def in_order(results: Results, first: int) -> Iterator[Row]:
    """Rows by the number of their attempt, which counts up from `first`; early ones wait."""
    waiting: dict[int, Row] = {}
    for row in results:
        assert isinstance(row, Row), "an attempt is no data that could be bad"
        waiting[attempt_number(row.id)] = row
        while first in waiting:
            yield waiting.pop(first)
            first += 1


def _settings(config: InventConfig) -> dict[str, Any]:
    """As they are read back from JSON."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(replace(config, model=shown(config.model)))))
    return settings


def _run_entry(tally: Tally, jobs: int) -> dict[str, Any]:
    names = ("kept", "already", "dropped", "tokens", "seconds", "prompts_per_s")
    return {"jobs": jobs, **{name: getattr(tally, name) for name in names}}


def _earlier_runs(meta: Path, config: InventConfig) -> list[dict[str, Any]]:
    runs, changed = earlier_runs(meta, _settings(config))
    if changed:
        raise ValueError(f"the prompts there were made with another {', '.join(changed)}; choose another --out")
    return runs


def plan(out: Path, count: int, config: InventConfig, turn: UserTurn, places: Sequence[str]) -> str:
    """What a run would do, without loading the model."""
    already = read_held(out).num_rows
    if already:
        _earlier_runs(out.with_name(f"{out.name}.meta.json"), config)
    todo = max(0, count - already)
    return (
        f"would invent {todo:,} prompts with {config.model} ({already:,} already in {out})\n"
        f"behind {turn.before!r}\n"
        f"with {len(config.openings):,} openings by turns, at most {config.max_tokens:,} tokens each\n"
        f"in {len(places)} process{'es' if len(places) > 1 else ''} on {', '.join(dict.fromkeys(places))}"
    )
