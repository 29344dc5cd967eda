"""What a run reports while it lasts: lines of JSON, and the same numbers for TensorBoard where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RunLog:
    """Appends to `log.jsonl` of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
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


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
