"""The log of a run: lines of JSON, and the same numbers for TensorBoard if it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jetspec.files import write_whole

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends to `log.jsonl` of a folder. Lines of steps after `step`, from an earlier part of the run or another run,
    are dropped."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_FILE
        kept = [row for row in _rows(self.path) if 0 < row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.board = _board(folder / "tensorboard", step + 1)

    def write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        """Writes one line. TensorBoard gets each number of a list under its index, counted from 1."""
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")
        if self.board is None:
            return
        for name, value in numbers.items():
            for i, number in enumerate(value if isinstance(value, list) else [value]):
                place = f"/{i + 1}" if isinstance(value, list) else ""
                self.board.add_scalar(f"{kind}/{name}{place}", number, step)
        self.board.flush()


def was_written(folder: Path, kind: str, step: int) -> bool:
    """True if the log of a folder has a line of this kind and step."""
    return any((row.get("kind"), row["step"]) == (kind, step) for row in _rows(folder / LOG_FILE))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a log, without an incomplete last one and others that are not reports of a step."""
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def _board(folder: Path, first: int) -> Any:
    """A TensorBoard writer, if available. It hides earlier reports of steps from `first` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first)
