"""Copies between the host and the device that do not block the host, and timestamps of the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from jetspec.ops.select import operation


@operation(lambda source, _: (source,))
def copy_to_host(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to host memory, pinned for a GPU. The copy is complete when a later event has completed.

    For a few numbers a kernel takes less time than the switch to a copy engine and back.
    """
    assert target.shape == source.shape and target.dtype == source.dtype
    target.copy_(source, non_blocking=True)


class Download:
    """Asynchronous copy of a tensor to the host. Its pinned memory is kept until the copy is complete, also when the
    object is deleted before it was read: the allocator does not track writes of the device."""

    arrived: torch.cuda.Event | None = None

    def __init__(self, source: Tensor) -> None:
        self.tensor = source
        if source.is_cuda:
            self.tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self.arrived = torch.cuda.Event()
            copy_to_host(source, self.tensor)
            self.arrived.record()

    def read(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the device has failed: no write is pending
            self.read()


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Create a small tensor on the device without blocking the host."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without blocking the host."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@operation(lambda time_S, _: (time_S,))
def note_time(time_S: Tensor, count_1: Tensor) -> None:
    """Append the time of the device, in nanoseconds, to a ring buffer and increment its count. Both are int64."""
    time_S[count_1 % len(time_S)] = time.perf_counter_ns()
    count_1 += 1
