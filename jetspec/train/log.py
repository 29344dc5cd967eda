"""What a run reports while it lasts: lines of JSON, and the same numbers for TensorBoard where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jetspec.files import write_whole

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends to `log.jsonl` of a folder. What an earlier part of the run, or another run, reported of steps that are
    still to come is dropped."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_FILE
        kept = [row for row in _rows(self.path) if 0 < row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.board = _board(folder / "tensorboard", step + 1)

    def write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        """One line. Of a list, TensorBoard gets every number under its place, counted from 1."""
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
    """Whether the log of a folder has such a line."""
    return any((row.get("kind"), row["step"]) == (kind, step) for row in _rows(folder / LOG_FILE))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, but for half of one that a kill may have left, and what is no report of a step."""
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def _board(folder: Path, first: int) -> Any:
    """TensorBoard hides what was reported of steps from `first` on before."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first)
