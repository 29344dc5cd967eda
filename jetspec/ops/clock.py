"""Timestamps of the device's own clock, between operations that may be captured in a graph."""

from __future__ import annotations

import time

from torch import Tensor

from jetspec.ops.select import select


def note_time(time_S: Tensor, count_1: Tensor) -> None:
    """Append the time, in nanoseconds, to a ring buffer and increment its count. Both are int64."""
    select("note_time", note_time_reference, time_S)(time_S, count_1)


def note_time_reference(time_S: Tensor, count_1: Tensor) -> None:
    time_S[count_1 % len(time_S)] = time.perf_counter_ns()
    count_1 += 1
