"""The device's own clock, read between operations that may be part of a graph."""

from __future__ import annotations

import time

from torch import Tensor

from jetspec.ops.select import select


def note_time(time_S: Tensor, count_1: Tensor) -> None:
    """Write the time, in nanoseconds, behind those that were noted before, and count it. Both are int64. What comes
    after the end is written over the first ones."""
    select("note_time", note_time_reference, time_S)(time_S, count_1)


def note_time_reference(time_S: Tensor, count_1: Tensor) -> None:
    time_S[count_1 % len(time_S)] = time.perf_counter_ns()
    count_1 += 1
