"""The log of a run, as lines of JSON and for TensorBoard if it is installed; its throughput and its time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetspec.files import write_whole
from jetspec.train.loss import DraftLoss

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


class Throughput:
    """Predictions per second since the last `read`, which alone waits for the device."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.began, self.positions = time.perf_counter(), torch.zeros(())

    def count(self, sums: DraftLoss) -> None:
        self.positions = sums.reach_D.sum() + self.positions

    def read(self) -> float:
        found = float(self.positions) / (time.perf_counter() - self.began)
        self.restart()
        return found


class TimeLimit:
    """Time used of `minutes`, and progress of the learning rate schedule.

    The schedule advances linearly in time, from its state after the first step of a part, which compiles, to 1.
    """

    def __init__(self, minutes: float | None, used_s: float = 0.0, done: float = 0.0) -> None:
        self.minutes = minutes
        self.used_s = used_s
        """Seconds of all parts of the run, at the last update."""
        self.done = done
        """Completed share of the schedule."""

    @property
    def is_over(self) -> bool:
        return self.minutes is not None and self.used_s >= 60 * self.minutes

    @property
    def state(self) -> dict[str, float]:
        """State that a checkpoint keeps."""
        return {"used_s": self.used_s, "done": self.done}

    def start(self) -> None:
        """Starts the clock of a part of the run."""
        self.origin: tuple[float, float] | None = None
        self.began = time.monotonic() - self.used_s

    def update(self) -> None:
        """Reads the clock of the first process. A collective: all processes call it at the same steps."""
        self.used_s = time.monotonic() - self.began
        if dist.is_initialized():
            box = [self.used_s]
            dist.broadcast_object_list(box, src=0)
            (self.used_s,) = box
        if self.minutes is None:
            return
        used, done = self.origin = self.origin or (self.used_s, self.done)
        left = 60 * self.minutes - used
        self.done = min(1.0, done + (1 - done) * (self.used_s - used) / left) if left > 0 else 1.0
