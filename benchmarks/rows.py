"""Groups of questions decoded together, and the resumable file of rows that holds their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.methods import Ask, Reply, UnequalConditions
from benchmarks.recipe import BenchConfig, Cell, with_new_keys
from benchmarks.results import RESULTS_FILE, RUN_FILE
from jetspec.data.conversation import Conversation
from jetspec.data.prompts import Prompt
from jetspec.data.rows import LineFile, earlier_runs, read_lines
from jetspec.record import current_commit, date_now, make_record, write_record

Row = Mapping[str, Any]
Key = tuple[Cell, int, int]
"""Cell, repeat, group."""


class RowsFile(LineFile):
    """Rows on disk by group: the last row of a group counts. `fresh` deletes earlier rows, settings and results."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.fresh = fresh
        super().__init__(path)
        for name in (RUN_FILE, RESULTS_FILE) if fresh else ():
            path.with_name(name).unlink(missing_ok=True)

    def read(self) -> int:
        self.rows: dict[Key, Row] = {}
        return 0 if self.fresh else read_lines(self.path, "{", self._add)

    def _add(self, row: Row) -> None:
        self.rows[group_key(row)] = row

    def begin(self, settings: Row, is_held: Callable[[str], bool], is_measured: bool) -> None:
        """Keep the settings of the rows, and the command that adds to them."""
        keep_settings(self.path.with_name(RUN_FILE), settings, is_held, is_measured)
        self.command = len(kept_settings(self.path.with_name(RUN_FILE))["runs"]) - 1

    def append(self, row: Row) -> None:
        """Add a row of this command."""
        row = {**row, "command": self.command, "date": date_now()}
        super().append(row)
        self._add(row)


def group_key(row: Row) -> Key:
    return Cell(**row["cell"]), row["repeat"], row["group"]


def has_failed(row: Row) -> bool:
    """A question of the group has no answer."""
    return any(answer["error"] for answer in row["answers"])


def read_rows(path: Path) -> dict[Key, Row]:
    rows: dict[Key, Row] = {}
    read_lines(path, "{", lambda row: rows.update({group_key(row): row}))
    return rows


def keep_settings(path: Path, settings: Row, is_held: Callable[[str], bool], is_measured: bool) -> None:
    """Refuse settings other than those of existing rows, then write the settings and the command that resumes.

    `is_held` tells whether existing rows depend on a setting.
    """
    runs, changed = earlier_runs(path, json.loads(json.dumps(settings)))
    for name, before in changed.items():
        if before is not None and is_held(name) and with_new_keys(before) != json.loads(json.dumps(settings[name])):
            task = name.removeprefix("task ")
            other = f"are of other questions of {task}" if task != name else f"were made with another {name}"
            raise ValueError(f"the rows in {path.parent} {other}; choose another --out, or --fresh")
    earlier = kept_settings(path)["settings"] if path.exists() else {}
    record = make_record({}, current_commit())
    now = {key: record[key] for key in ("command", "date", "commit")}
    write_record(path, {"settings": {**earlier, **settings}, "runs": [*runs, now] if is_measured else runs})


def kept_settings(path: Path) -> dict[str, Any]:
    """Contents of `keep_settings`: `settings`, and under `runs` the commands that measured."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def measured_by(rows: Iterable[Row], runs: Sequence[Row]) -> dict[str, Any]:
    """Command, date and commit that measured the last of the rows, for the head of a record."""
    if not runs:
        return {}
    last = max(rows, key=lambda row: str(row.get("date", "")))
    run = runs[last.get("command", -1)]
    return {"command": run["command"], "date": last.get("date", run["date"]), "commit": run["commit"]}


@dataclass(frozen=True)
class Group:
    cell: Cell
    repeat: int
    index: int
    prompts: Sequence[Prompt]

    @property
    def key(self) -> Key:
        return self.cell, self.repeat, self.index


@dataclass
class Answering:
    """The conversation of one question, turn by turn, and its record."""

    conversation: Conversation
    prompt_digests: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    accepted: list[int] | None = field(default_factory=list)
    other_prompts: list[int] = field(default_factory=list)
    """Turns that answer another prompt."""
    error: str | None = None

    @property
    def id(self) -> str:
        return self.conversation.prompt.id

    @property
    def turn(self) -> int:
        return len(self.conversation.spans)

    @property
    def has_next_turn(self) -> bool:
        return self.error is None and self.conversation.has_next_turn

    def ask(self, config: BenchConfig, temperature: float, repeat: int) -> Ask:
        talk = self.conversation
        if self.turn:
            talk.token_ids = talk.with_next_turn()
        self.prompt_tokens += len(talk.token_ids)
        self.prompt_digests.append(digest(talk.token_ids))
        sampling = config.sampling(temperature, repeat, self.id, self.turn)
        texts = iter(self.texts)  # the conversation has placeholders in their place
        messages = [{**said, "content": next(texts)} if said["role"] == "assistant" else said for said in talk.messages]
        return Ask(messages, talk.token_ids, sampling, self.turn)

    def take(self, reply: Reply | str) -> None:
        """Add a reply to the conversation; text is an error."""
        if isinstance(reply, str):
            self.error = reply
            return
        self.other_prompts += [self.turn] if reply.other_prompt else []
        self.conversation.answer(reply.token_ids, reply.finish)
        self.texts.append(reply.text)
        self.num_tokens.append(reply.num_tokens)
        if reply.accepted is None or self.accepted is None:
            self.accepted = None
        else:
            self.accepted += reply.accepted

    def answer(self) -> dict[str, Any]:
        talk = self.conversation
        return {
            "id": self.id,
            "turn_tokens": [talk.token_ids[start:end] for start, end in talk.spans],
            "tokens": self.num_tokens,
            "text": self.texts,
            "finish": talk.finish,
            "rounds": None if self.accepted is None else len(self.accepted),
            "accepted": histogram(self.accepted or []),
            "other_prompts": self.other_prompts,
            "error": self.error,
        }


def histogram(lengths: Sequence[int]) -> list[int]:
    """Number of rounds that accepted 0, 1, 2, .. draft tokens."""
    counts: list[int] = np.bincount(np.array(lengths, int)).tolist()
    return counts


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def questions_digest(prompts: Iterable[Prompt]) -> str:
    """Digest of questions without their references."""
    return digest([[prompt.id, prompt.system, prompt.turns] for prompt in prompts])


def check_prompts(rows: Iterable[Row]) -> None:
    """Refuse rows in which two methods read different tokens for the same question after the same answers."""
    read: dict[tuple[str, str, str], tuple[str, str]] = {}
    for row in rows:
        method, task = row["cell"]["method"], row["cell"]["task"]
        for answer, digests in zip(row["answers"], row["prompts"], strict=True):
            for turn, tokens in enumerate(digests):
                said = task, answer["id"], digest(answer["turn_tokens"][:turn])
                other, expected = read.setdefault(said, (method, tokens))
                if tokens != expected:
                    raise UnequalConditions(f"{method} and {other} read different prompts for {answer['id']}")
