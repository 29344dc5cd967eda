"""Prompts from files of JSON lines or a Hugging Face dataset."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from jetspec.files import missing_package
from jetspec.settings import at_least

Responses = Literal["target", "corpus"]
"""Source of the answers: the target, or the data itself."""
DATA_ENDINGS = (".jsonl", ".jsonl.gz")
OnBad = Literal["stop", "skip"]
"""Treatment of a row that cannot be used."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bing", "bard"), "assistant"),
}
"""Roles of chat messages, in the names of OpenAI and of ShareGPT."""


@dataclass(frozen=True)
class Prompt:
    """User messages to answer one after the other, with the answers of the data where they are used."""

    id: str
    turns: list[str]
    responses: list[str]
    system: str | None
    where: str
    """File and line."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The unchanged row of the data. Graders read the expected answer from it."""


@dataclass(frozen=True)
class BadPrompt:
    """A row of the data that cannot be used."""

    where: str
    """File and line."""
    reason: str


@dataclass(frozen=True)
class CutPrompt:
    """A prompt whose last turns have no answer, because the context was full."""

    where: str
    """File and line."""
    answered: int
    turns: int


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts to answer."""

    hf_dataset: str | None = None
    """Hugging Face dataset with prompts."""
    split: str = "train"
    """Split of that dataset."""
    limit: int | None = None
    """Only the first prompts, as many."""
    shard: str = "0/1"
    """I/N: only part I of N, I from 0, for several machines."""
    on_bad: OnBad = "stop"
    """Treatment of a prompt that cannot be used."""

    def __post_init__(self) -> None:
        at_least(1, "limit", self.limit)
        parse_shard(self.shard)


@dataclass(frozen=True)
class PromptData(PromptOptions):
    """Sources of prompts and the selection from them. Every iteration reads them anew.

    Parts of a shard are chosen by id, so they do not depend on order.
    """

    paths: tuple[Path, ...] = ()
    """JSONL files, gzipped or not, or folders of them."""
    responses: Responses = "target"

    @property
    def sources(self) -> list[str]:
        return [*map(str, self.paths), *([self.hf_dataset] if self.hf_dataset else [])]

    def __iter__(self) -> Iterator[Prompt | BadPrompt]:
        ids: set[str] = set()
        is_empty = True
        shard, num_shards = parse_shard(self.shard)
        for where, default_id, raw in self._rows():
            is_empty = False
            if len(ids) == self.limit:
                return
            found = raw if isinstance(raw, BadPrompt) else parse_prompt(raw, where, default_id, self.responses)
            if isinstance(found, Prompt) and found.id in ids:
                found = BadPrompt(where, f"the id {found.id!r} appears twice")
            if isinstance(found, Prompt):
                ids.add(found.id)
            if isinstance(found, BadPrompt) or stable_hash(f"shard/{found.id}") % num_shards == shard:
                yield found
        if is_empty:
            raise ValueError(f"no prompts in {', '.join(self.sources)}")

    def _rows(self) -> Iterator[tuple[str, str, Any]]:
        """File and line, the first part of the id of a row without one, and the row."""
        if self.hf_dataset:
            for number, row in enumerate(load_rows(self.hf_dataset, self.split)):
                yield f"{self.hf_dataset}:{number}", f"{self.hf_dataset}/{number}", row
        for file in _data_files(self.paths):
            name = file.name.removesuffix(".gz").removesuffix(".jsonl")
            for number, row in _json_rows(file):
                yield f"{file}:{number}", f"{name}/{number}", row


def parse_prompt(raw: Any, where: str, default_id: str, responses: Responses = "target") -> Prompt | BadPrompt:
    """Reads `turns` or `prompt` (with `response`, a text or one per turn), or a chat: `messages` of role and content,
    or ShareGPT's `conversations` of from and value.

    A row without an id is named by its place and its user messages, so an edited row is another prompt.
    """
    try:
        if not isinstance(raw, Mapping):
            raise ValueError("is not a JSON object")
        system, turns, answers = _read_turns(raw)
        if responses == "corpus":
            if not isinstance(answers, list) or len(answers) != len(turns):
                raise ValueError(f"does not have one response per turn ({len(turns)})")
            for number, answer in enumerate(answers, 1):
                _check_text(answer, f"response {number}")
        if raw.get("id") is not None:
            _check_text(str(raw["id"]), "the id")
    except ValueError as error:
        return BadPrompt(where, str(error))
    used = answers if responses == "corpus" else []
    mark = stable_hash(json.dumps([system, *turns])) >> 32
    id = f"{default_id}-{mark:08x}" if raw.get("id") is None else str(raw["id"])
    return Prompt(id, turns, used, system, where, raw)


def _read_turns(raw: Mapping[str, Any]) -> tuple[str | None, list[str], Any]:
    """System message, user messages, and the unchecked answers of a row."""
    system, answers, name = None, raw.get("response"), "user message"
    if "turns" in raw:
        turns, name = raw["turns"], "turn"
        if not isinstance(turns, list):
            raise ValueError("turns is not a list")
        if not turns:
            raise ValueError("turns is empty")
    elif "messages" in raw:
        system, turns, answers = _read_chat(raw["messages"], "messages", "role", "content")
    elif "conversations" in raw:
        system, turns, answers = _read_chat(raw["conversations"], "conversations", "from", "value")
    elif "prompt" in raw:
        turns, name = [raw["prompt"]], "prompt"
    else:
        raise ValueError("has none of turns, prompt, messages and conversations")
    for number, turn in enumerate(turns, 1):
        _check_text(turn, name if name == "prompt" else f"{name} {number}")
    return system, turns, [answers] if isinstance(answers, str) else answers or []


def _read_chat(chat: Any, key: str, role_key: str, text_key: str) -> tuple[str | None, list[Any], list[Any]]:
    """System message, messages of the user, and those of the assistant."""
    try:
        messages = [(message[role_key], message[text_key]) for message in chat]
    except (TypeError, KeyError):
        raise ValueError(f"{key} is not a list of objects with {role_key} and {text_key}") from None
    for role, _ in messages:
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"unknown role {role!r}")
    said = [(ROLES[role], text) for role, text in messages]
    first = next((role for role, _ in said if role != "system"), None)
    if first != "user":
        raise ValueError(f"begins with a message of the {first}, not of the user" if first else "has no user message")
    system = next((text for role, text in said if role == "system"), None) or None
    if system is not None:
        _check_text(system, "the system message")
    return system, [text for role, text in said if role == "user"], [t for role, t in said if role == "assistant"]


def _check_text(value: object, name: str) -> None:
    """Refuses everything but text in valid Unicode that holds more than white space."""
    try:
        if not isinstance(value, str):
            raise ValueError(f"{name} is not text")
        if not value.strip().encode():
            raise ValueError(f"{name} is empty text")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not text in valid Unicode") from None


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a file with their numbers: one per line, or the objects of a single JSON list. A row that cannot be
    read is a `BadPrompt`."""
    lines = text_lines(file)
    head = list(islice(lines, 1))
    if head and (head[0][1] or "").lstrip().startswith("["):
        head += lines
        whole = _parse_json("\n".join(line or "" for _, line in head), "")
        if isinstance(whole, list) and all(isinstance(row, Mapping) for row in whole):
            yield from enumerate(whole, 1)
            return
    for number, line in chain(head, lines):
        yield number, _parse_json(line, f"{file}:{number}")


def _parse_json(line: str | None, where: str) -> Any:
    if line is None:
        return BadPrompt(where, "is not UTF-8 text")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return BadPrompt(where, f"is not valid JSON ({error.msg}: character {error.pos + 1})")
    except (ValueError, RecursionError) as error:
        return BadPrompt(where, f"is not valid JSON ({error})")


def _data_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.name.endswith(DATA_ENDINGS))
            if not found:
                raise ValueError(f"{path} holds no .jsonl or .jsonl.gz file")
            files += found
        else:
            files.append(path)
    return files


def text_lines(file: Path) -> Iterator[tuple[int, str | None]]:
    """Lines with their numbers, without blank ones and the byte-order mark; None for one that is not UTF-8."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    try:
                        yield number, line.decode()
                    except UnicodeDecodeError:
                        yield number, None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise ValueError(f"{file} is not a complete gzip file; download it again") from None


def find_tasks(folder: Path, names: Sequence[str] | None) -> dict[str, Path]:
    """Files FOLDER/NAME.jsonl, or else .jsonl.gz, by name; without names, all of them."""
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

    A bad one is an error: results are comparable only for the same questions.
    """
    prompts = []
    for prompt in PromptData((path,), limit=limit):
        if isinstance(prompt, BadPrompt):
            raise ValueError(f"{prompt.where} {prompt.reason}")
        prompts.append(prompt)
    return prompts


def load_rows(name: str, split: str, part: str | None = None, file: str | None = None) -> Iterable[Any]:
    """Rows of a Hugging Face dataset, of one part of it, or, read lazily, of one of its JSON files.

    A dataset with a loading script is read by file: no downloaded code is run.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise missing_package("datasets", "train", "a Hugging Face dataset") from None
    if file is not None:
        streamed: Iterable[Any] = load_dataset(
            "json", data_files=f"hf://datasets/{name}/{file}", split="train", streaming=True
        )
        return streamed
    rows: Iterable[Any] = load_dataset(*filter(None, (name, part)), split=split)
    return rows


def parse_shard(text: str) -> tuple[int, int]:
    """Part I of N from the text I/N."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"shard is {text!r}; give I/N with I from 0 to N - 1")
    return int(index), int(count)


def stable_hash(text: str) -> int:
    """A hash of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")
