"""Time in a run: how fast it is, and how much of it is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from jetspec.train.loss import DraftLoss


class Speed:
    """Predictions per second since the last look, without waiting for the device before that."""

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
    """How much of `minutes` a run has used, and how far its schedule has come.

    The schedule goes evenly from where it stands after the first step of a part, which compiles, to 1 at the end.
    """

    minutes: float | None
    used_s: float = 0.0
    """By all parts of the run, at the last look."""
    done: float = 0.0
    """Share of the schedule."""
    _before_s: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)
    _origin: tuple[float, float] | None = field(default=None, init=False)

    @property
    def is_over(self) -> bool:
        return self.minutes is not None and self.used_s >= 60 * self.minutes

    @property
    def state(self) -> dict[str, float]:
        """What a later part of the run needs to know."""
        return {"used_s": self.used_s, "done": self.done}

    def start(self) -> None:
        """A part of the run begins."""
        self._before_s, self._began, self._origin = self.used_s, time.monotonic(), None

    def look(self) -> None:
        """Read the clock of the first process: all must look at the same steps, and then agree."""
        self.used_s = _agreed(self._before_s + time.monotonic() - self._began)
        if self.minutes is None:
            return
        if self._origin is None:
            self._origin = (self.used_s, self.done)
        used, done = self._origin
        left = 60 * self.minutes - used
        self.done = min(1.0, done + (1 - done) * (self.used_s - used) / left) if left > 0 else 1.0


def _agreed(number: float) -> float:
    """What the first process says."""
    if not dist.is_initialized():
        return number
    box = [number]
    dist.broadcast_object_list(box, src=0)
    return box[0]
