"""Rows on disk: conversations as token ids, one line of JSON each, in a file that survives any kill."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec.files import lock, naming

SYNC_S = 5.0
"""Most seconds between two syncs to disk. Rows reach the operating system at once."""
ROW_START = '{"id": '
"""First characters of every row on disk."""


@dataclass(frozen=True)
class Row:
    id: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    finish: list[str]

    @property
    def num_written(self) -> int:
        return sum(end - start for start, end in self.spans)


class LineFile(ABC):
    """An append-only file of JSON lines. An incomplete last line, left by a kill, is cut off on opening."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file, which rows need; choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, path.open("a+b")
        try:
            lock(self.file, f"{path}: another run is writing to it")
            self.file.truncate(self.read())
        except BaseException:
            self.file.close()
            raise
        self.synced = time.monotonic()

    @abstractmethod
    def read(self) -> int:
        """Reads the lines of the file; returns the end of the last complete one, in bytes."""

    def append(self, line: Mapping[str, Any]) -> None:
        with naming(self.path):
            self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self.file.flush()
            if time.monotonic() - self.synced > SYNC_S:
                self._sync()

    def close(self) -> None:
        """Closes the file, and removes it if it has no lines."""
        with naming(self.path), self.file:
            self._sync()
            if not os.fstat(self.file.fileno()).st_size:
                self.path.unlink()

    def _sync(self) -> None:
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()


class RowFile(LineFile):
    """The output of `jetspec data regenerate`."""

    def read(self) -> int:
        self.ids, end = read_ids(self.path)
        return end


def read_ids(path: Path) -> tuple[set[str], int]:
    """Ids of all complete rows of a file, if it exists, and the end of the last one, in bytes."""
    ids: set[str] = set()

    def add(row: Mapping[str, Any]) -> None:
        if not {"id", "token_ids", "spans"} <= row.keys():
            raise ValueError("keys are missing")
        ids.add(row["id"])

    return ids, read_lines(path, ROW_START, add)


@dataclass
class RunTally:
    """Counts of one run that every record keeps."""

    already: int = 0
    tokens: int = 0
    began: float = 0.0
    seconds: float = 0.0

    def count_tokens(self, row: Row) -> None:
        self.tokens += row.num_written
        self.seconds = time.monotonic() - self.began

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    def entry(self, counts: Sequence[str], jobs: int) -> dict[str, Any]:
        """The entry of the run in a record."""
        return {"jobs": jobs, **{name: getattr(self, name) for name in counts}}


@contextmanager
def record_of(out: Path) -> Iterator[Path]:
    """Path of the record beside a file. The record is removed if the file does not exist afterwards."""
    meta = out.with_name(f"{out.name}.meta.json")
    try:
        yield meta
    finally:
        if not out.exists():
            meta.unlink(missing_ok=True)


def earlier_runs(meta: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Earlier runs that wrote to a file, and the former values of those `settings` that have changed since.

    Rows of different settings must not be mixed. A file without a record passes.
    """
    if not meta.exists():
        return [], {}
    try:
        record = json.loads(meta.read_text(encoding="utf-8"))
        runs: list[dict[str, Any]] = record["runs"]
        changed = {key: record["settings"].get(key) for key in settings if record["settings"].get(key) != settings[key]}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{meta} is damaged; delete it to resume") from None
    return runs, changed


def resumable_runs(meta: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier runs that wrote to a file, which must have had the same settings."""
    runs, changed = earlier_runs(meta, settings)
    if changed:
        words = " and ".join(
            f"another {key}" if isinstance(before, list) else f"{key} {before}, not {settings[key]}"
            for key, before in changed.items()
        )
        raise ValueError(f"the rows there were made with {words}; choose another --out")
    return runs


def read_lines(path: Path, start: str, take: Callable[[Any], None]) -> int:
    """Passes every complete line of JSON of a file, if it exists, to `take`; returns the end of the last one, in bytes.

    A file is refused if `take` raises an error, or if an incomplete last line does not begin with `start`.
    """
    end, first = 0, start.encode()
    if not path.is_file():
        return end
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.endswith(b"\n"):
                    take(json.loads(line))
                elif line[: len(first)] == first[: len(line)]:
                    break
                else:
                    raise ValueError("the line is not of this command")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(f"{path}:{number}: is not a row of this command; choose another --out") from None
            end += len(line)
    return end
