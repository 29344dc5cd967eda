"""Fills uninitialized memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))
"""Functions that return uninitialized memory."""


def fill_unwritten() -> None:
    """Fills new uninitialized tensors with NaN or the largest integer. Otherwise they are mostly zero, and an error
    shows once in a hundred runs.

    Without effect where a GPU is available: tests capture the same graphs as users there.
    """
    if torch.cuda.is_available():
        return
    _device_constructors()  # caches the functions of a device context before they are replaced
    for owner, name in MAKERS:
        setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made if made.is_meta or made.dtype == torch.bool else _fill(made)

    return filled


@torch.no_grad()
def _fill(made: Tensor) -> Tensor:
    return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)
