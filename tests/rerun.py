"""Stand-ins for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from jetspec.capture import GraphPool
from jetspec.engine.engine import Engine
from jetspec.ops.transfer import Download

R = TypeVar("R")


def replay_all(patch: pytest.MonkeyPatch) -> None:
    """Makes engines capture and replay prefills and rounds as on a GPU. Results of rounds are copied."""
    patch.setattr(Engine, "_uses_graphs", lambda self, config: True)
    patch.setattr("jetspec.engine.engine.GraphPool", RerunPool)
    patch.setattr("jetspec.engine.runner.Download", lambda source: Download(source.clone()))


class Rerun:
    """Calls the captured function again, and writes its results to the tensors of the first call."""

    def __init__(self, run: Callable[[], object], result: object) -> None:
        self.run, self.result = run, result

    def replay(self) -> None:
        found = tensors_of(self.run())
        with torch.no_grad():
            for old, new in zip(tensors_of(self.result), found, strict=True):
                old.copy_(new)


class RerunPool(GraphPool):
    def __init__(self, device: torch.device) -> None:
        self.device, self.num_captured = device, 0

    def capture(self, run: Callable[[], R]) -> tuple[Any, R]:
        self.num_captured += 1
        result = run()
        return Rerun(run, result), result


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors of a tensor, a tuple or an object."""
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    return [x for x in (value if isinstance(value, tuple) else vars(value).values()) if isinstance(x, Tensor)]
