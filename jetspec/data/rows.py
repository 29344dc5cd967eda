"""Rows on disk: one line of JSON each, in a file that survives any kill, with a record of the runs that wrote them."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jetspec.files import lock, naming
from jetspec.record import write_record

SYNC_S = 5.0
"""Most seconds between two syncs to disk. Rows reach the operating system at once."""


@dataclass(frozen=True)
class Row:
    """A conversation as token ids."""

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


class JobFile(LineFile):
    """The output of a command that resumes, with the record FILE.meta.json of its runs. Rows of other settings are
    refused. If not `writes`, it is only read."""

    start: ClassVar[str]
    """First characters of every row."""

    def __init__(self, path: Path, settings: Mapping[str, Any], writes: bool = True) -> None:
        self.path, self.settings = path, settings
        self.meta = path.with_name(f"{path.name}.meta.json")
        self.runs: list[dict[str, Any]] = []
        if writes:
            super().__init__(path)
        else:
            self.read()

    def read(self) -> int:
        end = read_lines(self.path, self.start, self.add)
        self.runs = resumable_runs(self.meta, self.settings) if end else []
        return end

    @abstractmethod
    def add(self, row: Mapping[str, Any]) -> None:
        """Takes a row that the file holds already."""

    def record(self, *runs: Mapping[str, Any], **about: Any) -> None:
        """Writes the record: that of the earlier runs, and of `runs`."""
        write_record(self.meta, {"settings": self.settings, **about, "runs": [*self.runs, *runs]})

    def close(self) -> None:
        super().close()
        if not self.path.exists():
            self.meta.unlink(missing_ok=True)


@dataclass
class RunTally:
    """Counts of one run that every record keeps."""

    RECORDED: ClassVar[tuple[str, ...]]
    """Names of the counts in a record."""
    already: int = 0
    tokens: int = 0
    began: float = 0.0
    seconds: float = 0.0

    def count_tokens(self, row: Row) -> None:
        self.tokens += row.num_written
        self.seconds = time.monotonic() - self.began

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    def entry(self, jobs: int) -> dict[str, Any]:
        """The entry of the run in a record."""
        return {"jobs": jobs, **{name: getattr(self, name) for name in self.RECORDED}}


def earlier_runs(meta: Path, settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
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


def resumable_runs(meta: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
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
