"""What a run reports while it lasts: lines of JSON, and the same numbers for TensorBoard where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends to `log.jsonl` of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_FILE
        self.board = _board(folder / "tensorboard")

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
    """Whether the log of a folder has such a line from when the step was last reached; it may be that of two runs."""
    path = folder / LOG_FILE
    for line in reversed(path.read_text().splitlines() if path.exists() else []):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half a line, left by a kill
        if row["step"] < step:
            return False
        if (row["kind"], row["step"]) == (kind, step):
            return True
    return False


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
