"""How long something takes, by the clock of the device that does it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

R = TypeVar("R")
GROUPS = 5


class Moment:
    """Now. On a GPU: when it has finished what it was told before."""

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
    """Milliseconds per call: the median of a few groups of calls, after one that warms up."""
    return statistics.median(ms for (ms,) in time_in_turns_ms([run], device, calls))


def time_in_turns_ms(runs: Sequence[Callable[[], object]], device: torch.device, calls: int) -> list[list[float]]:
    """Of several that are to be compared, each group of calls: all take turns, so that whatever the device does with
    its clock meanwhile is done to all of them."""
    repeats = max(1, calls // GROUPS)

    def group_ms(run: Callable[[], object]) -> float:
        began = Moment(device)
        for _ in range(repeats):
            run()
        return began.ms_until(Moment(device)) / repeats

    _warm_up, *turns = ([group_ms(run) for run in runs] for _ in range(1 + GROUPS))
    return turns


def as_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` as a CUDA graph, so that the host's part of it is not timed; on a CPU as it is.

    What `run` leaves in its own variables then belongs to the graph and holds the values of one replay.
    """
    if device.type == "cpu":
        return run
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


class Captures(Protocol):
    """Who captures graphs when they are first needed."""

    @property
    def num_captured(self) -> int: ...


def without_capture(captures: Captures | None, run: Callable[[], R]) -> R:
    """What `run` returns once it needs no new graph: capturing is no part of what is timed."""
    while True:
        before = captures and captures.num_captured
        result = run()
        if before == (captures and captures.num_captured):
            return result
