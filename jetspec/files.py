"""Files: errors name them, no failure leaves half of one, and no two runs write the same one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file, whole or not at all: beside its final name first, then moved into place.

    A device or a pipe is written to as it is: a move would put a file in its place.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def lock(file: IO[Any], refusal: str) -> None:
    """Have an open file alone, where the system can say so. The lock goes with the process, however it ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None
    except (ImportError, OSError):
        return
