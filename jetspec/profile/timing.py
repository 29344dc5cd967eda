"""Timing by the clock of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from jetspec.capture import GraphPool

R = TypeVar("R")
GROUPS = 5


class Moment:
    """A point in time. On a GPU: the end of all work launched before."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def ms_until(self, later: Moment) -> float:
        if self.event is None or later.event is None:
            return (later.seconds - self.seconds) * 1e3
        later.event.synchronize()
        return self.event.elapsed_time(later.event)


def time_ms(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Milliseconds per call: the median over groups of calls, after a warm-up group."""
    return statistics.median(ms for (ms,) in time_in_turns_ms([run], device, calls))


def time_in_turns_ms(runs: Sequence[Callable[[], object]], device: torch.device, calls: int) -> list[list[float]]:
    """Milliseconds per call of several functions, for each group of calls. Groups alternate between the functions, so
    that changes of the device's clock affect all of them."""
    repeats = max(1, calls // GROUPS)

    def group_ms(run: Callable[[], object]) -> float:
        began = Moment(device)
        for _ in range(repeats):
            run()
        return began.ms_until(Moment(device)) / repeats

    _warm_up, *turns = ([group_ms(run) for run in runs] for _ in range(1 + GROUPS))
    return turns


def as_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures `run` as a CUDA graph, so that host time is not measured. On a CPU it is returned unchanged.

    Variables that `run` sets then belong to the graph, and hold the values of its last replay.
    """
    if device.type == "cpu":
        return run
    pool = GraphPool(device)
    pool.capture(run)

    def replay() -> None:
        pool.graphs[0].replay()  # the stream of the graph is its own as long as the pool lives

    replay()
    return replay


class Captures(Protocol):
    """Counter of captured graphs."""

    @property
    def num_captured(self) -> int: ...


def without_capture(captures: Captures | None, run: Callable[[], R]) -> R:
    """Result of the first `run` that captures no graph, so that captures are not timed."""
    while True:
        before = captures and captures.num_captured
        result = run()
        if before == (captures and captures.num_captured):
            return result
