"""Prompts as they lie on disk: files of JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Responses = Literal["target", "corpus"]
"""Who answers: the target, or the data itself."""
DATA_ENDINGS = (".jsonl", ".jsonl.gz")
OnBad = Literal["stop", "skip"]
"""What to do about a row that cannot be used."""


@dataclass(frozen=True)
class Prompt:
    """User messages to answer one after the other, and the answers of the corpus where it has them."""

    id: str
    turns: list[str]
    responses: list[str]
    system: str | None
    where: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data as it stands, with what an answer is graded by."""


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


@dataclass(frozen=True)
class PromptData:
    """Where prompts come from, and which of them are meant. Iterating reads them anew."""

    paths: tuple[Path, ...] = ()
    """JSONL files, gzipped or not, or folders of them."""
    hf_dataset: str | None = None
    split: str = "train"
    limit: int | None = None
    """Use only the first so many good prompts."""
    shard: tuple[int, int] = (0, 1)
    """Use part i of n. Parts are chosen by id, so they do not depend on order."""
    responses: Responses = "target"

    def __iter__(self) -> Iterator[Prompt | BadPrompt]:
        seen: set[str] = set()
        shard, num_shards = self.shard
        for where, default_id, raw in self._rows():
            if len(seen) == self.limit:
                return
            found = raw if isinstance(raw, BadPrompt) else parse_prompt(raw, where, default_id, self.responses)
            if isinstance(found, Prompt) and found.id in seen:
                found = BadPrompt(where, f"the id {found.id!r} appears twice")
            if isinstance(found, Prompt):
                seen.add(found.id)
            if isinstance(found, BadPrompt) or stable_hash(f"shard/{found.id}") % num_shards == shard:
                yield found

    def _rows(self) -> Iterator[tuple[str, str, Any]]:
        """File and line, the beginning of the id of a row that has none, and the row."""
        if self.hf_dataset:
            for number, row in enumerate(load_rows(self.hf_dataset, self.split)):
                yield f"{self.hf_dataset}:{number}", f"{self.hf_dataset}/{number}", row
        for file in _data_files(self.paths):
            name = file.name.removesuffix(".gz").removesuffix(".jsonl")
            for number, line in text_lines(file):
                where = f"{file}:{number}"
                yield where, f"{name}/{number}", _parse_json(line, where)


def parse_prompt(raw: Any, where: str, default_id: str, responses: Responses = "target") -> Prompt | BadPrompt:
    """Read `turns` (with `response`, a text or one per turn), or a chat under `messages`.

    A row without an id is named by its place and what the user says, so one that was edited is another prompt.
    """
    if not isinstance(raw, Mapping):
        return BadPrompt(where, "is not a JSON object")
    system = None
    if "turns" in raw:
        turns, answers = raw["turns"], raw.get("response")
        answers = [answers] if isinstance(answers, str) else answers or []
    elif "messages" in raw:
        try:
            said = [(message["role"], message["content"]) for message in raw["messages"]]
        except (TypeError, KeyError):
            return BadPrompt(where, "messages is not a list of objects with role and content")
        if next((role for role, _ in said if role != "system"), None) == "assistant":
            return BadPrompt(where, "begins with a message of the assistant, not of the user")
        system = next((text for role, text in said if role == "system"), None) or None
        turns = [text for role, text in said if role == "user"]
        answers = [text for role, text in said if role == "assistant"]
    else:
        return BadPrompt(where, "has neither turns nor messages")
    if not isinstance(turns, list) or not turns:
        return BadPrompt(where, "has no turns")
    if not all(map(_is_text, turns)):
        return BadPrompt(where, "has a turn that is empty or not text")
    if system is not None and not _is_text(system):
        return BadPrompt(where, "has a system message that is not text")
    if responses == "corpus":
        if not isinstance(answers, list) or len(answers) != len(turns):
            return BadPrompt(where, f"does not have one response per turn ({len(turns)})")
        if not all(map(_is_text, answers)):
            return BadPrompt(where, "has a response that is empty or not text")
    if raw.get("id") is not None and not _is_text(str(raw["id"])):
        return BadPrompt(where, "has an id that is empty or not text")
    used = answers if responses == "corpus" else []
    mark = stable_hash(json.dumps([system, *turns])) >> 32
    id = f"{default_id}-{mark:08x}" if raw.get("id") is None else str(raw["id"])
    return Prompt(id, turns, used, system, where, raw)


def _is_text(value: object) -> bool:
    """Whether it says something, in valid Unicode."""
    try:
        return isinstance(value, str) and bool(value.strip().encode())
    except UnicodeEncodeError:
        return False


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
    """Lines with their numbers, empty ones left out; None for one that is no text."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    try:
                        yield number, line.decode()
                    except UnicodeDecodeError:
                        yield number, None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise ValueError(f"{file} is no whole gzip file; fetch it again") from None


def load_rows(name: str, split: str, part: str | None = None, file: str | None = None) -> Iterable[Any]:
    """The rows of a Hugging Face dataset, of one part of it, or of one of its JSON files, read as far as it is asked.

    A dataset that comes with a loading script is read by file: nothing that others wrote is run.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("Hugging Face datasets need the package `datasets`: pip install 'jetspec[train]'") from None
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
    """64 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")
