"""Which implementation an operation runs: its Triton kernel on a GPU, its plain torch reference elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Kernels = Literal["auto", "triton", "reference"]

HAS_TRITON = find_spec("triton") is not None

_forced: Kernels = "auto"


def uses_kernel(*inputs: Tensor) -> bool:
    """Whether a kernel serves these inputs. Kernels have no backward, so what is being trained goes another way."""
    if _forced != "auto":
        return _forced == "triton"
    if not HAS_TRITON or not inputs[0].is_cuda:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


@contextmanager
def force(kernels: Kernels) -> Iterator[None]:
    """Run one implementation for a while: the reference on a GPU, or kernels on a CPU under Triton's interpreter."""
    global _forced
    before, _forced = _forced, kernels
    try:
        yield
    finally:
        _forced = before
