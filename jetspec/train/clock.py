"""Throughput of a run, and its time limit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from jetspec.train.loss import DraftLoss


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


@dataclass
class TimeLimit:
    """Time used of `minutes`, and progress of the learning rate schedule.

    The schedule advances linearly in time, from its state after the first step of a part, which compiles, to 1.
    """

    minutes: float | None
    used_s: float = 0.0
    """Seconds of all parts of the run, at the last update."""
    done: float = 0.0
    """Completed share of the schedule."""
    _before_s: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)
    _origin: tuple[float, float] | None = field(default=None, init=False)

    @property
    def is_over(self) -> bool:
        return self.minutes is not None and self.used_s >= 60 * self.minutes

    @property
    def state(self) -> dict[str, float]:
        """State that a checkpoint keeps."""
        return {"used_s": self.used_s, "done": self.done}

    def start(self) -> None:
        """Starts the clock of a part of the run."""
        self._before_s, self._began, self._origin = self.used_s, time.monotonic(), None

    def update(self) -> None:
        """Reads the clock of the first process. A collective: all processes call it at the same steps."""
        self.used_s = self._before_s + time.monotonic() - self._began
        if dist.is_initialized():
            box = [self.used_s]
            dist.broadcast_object_list(box, src=0)
            (self.used_s,) = box
        if self.minutes is None:
            return
        if self._origin is None:
            self._origin = (self.used_s, self.done)
        used, done = self._origin
        left = 60 * self.minutes - used
        self.done = min(1.0, done + (1 - done) * (self.used_s - used) / left) if left > 0 else 1.0
