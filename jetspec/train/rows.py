"""Rows on disk: conversations as token ids, one line of JSON each, in a file that survives any kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SYNC_S = 5.0
"""Rows reach the system at once and the disk at least this often."""
ROW_START = b'{"id": '
"""How every row begins on disk."""


@dataclass(frozen=True)
class Row:
    id: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    finish: list[str]

    @property
    def num_written(self) -> int:
        return sum(end - start for start, end in self.spans)


class LineFile:
    """Lines of JSON on disk, only ever appended to. What a kill left of a last one is cut off on opening."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file, which rows need; choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, path.open("a+b")
        try:
            _lock(self.file)
            self.file.truncate(self.read())
        except BaseException:
            self.file.close()
            raise
        self.synced = time.monotonic()

    def read(self) -> int:
        """Take in what is there, and say where its last whole line ends, in bytes."""
        raise NotImplementedError

    def write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        if time.monotonic() - self.synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        """A file without lines is not left behind."""
        with self.file:
            self._sync()
            if not os.fstat(self.file.fileno()).st_size:
                self.path.unlink()

    def _sync(self) -> None:
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()


class RowFile(LineFile):
    """Rows on disk."""

    def read(self) -> int:
        self.ids, end = _read_ids(self.file)
        return end

    def append(self, row: Row) -> None:
        self.write(vars(row))


def _lock(file: BinaryIO) -> None:
    """One run at a time, where the system can say so. The lock goes with the process, however it ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{file.name}: another run is writing to it") from None
    except (ImportError, OSError):
        return


def finished_ids(path: Path) -> set[str]:
    """The ids of all whole rows in a file, which need not exist."""
    if not path.is_file():
        return set()
    with path.open("rb") as file:
        return _read_ids(file)[0]


def _read_ids(file: BinaryIO) -> tuple[set[str], int]:
    """The ids of all whole rows, and where the last of them ends. A file that holds anything else is refused."""
    ids: set[str] = set()
    end = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        try:
            if not line.endswith(b"\n"):
                if line[: len(ROW_START)] != ROW_START[: len(line)]:
                    raise ValueError
                break
            row = json.loads(line)
            if not {"id", "token_ids", "spans"} <= row.keys():
                raise ValueError
            ids.add(row["id"])
        except (ValueError, AttributeError):
            raise ValueError(f"{file.name}:{number}: is not a row of this command; choose another --out") from None
        end += len(line)
    return ids, end
