"""Copies between the host and the device that do not stop the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from jetspec.ops.select import select


def copy_to_host(news: Tensor, place: Tensor) -> None:
    """Write a tensor to the host, pinned where it comes from a GPU: it has arrived when an event behind this happened.

    A kernel writes a few numbers in less time than it takes to hand over to a copy engine and back.
    """
    assert place.shape == news.shape and place.dtype == news.dtype
    select("copy_to_host", copy_to_host_reference, news)(news, place)


def copy_to_host_reference(news: Tensor, place: Tensor) -> None:
    place.copy_(news, non_blocking=True)


class Download:
    """A tensor on its way to the host. On a GPU the host goes on with other work until it reads it, or drops it: nobody
    else knows that the device writes to its memory, so that is kept until it has arrived."""

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
        with suppress(RuntimeError):  # a device that failed writes no more
            self.read()


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on the device."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. On a GPU the host does not wait for it to arrive."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
