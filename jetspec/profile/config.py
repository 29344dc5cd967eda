"""Settings of `jetspec profile`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jetspec.config import DtypeName, TreeConfig
from jetspec.models.hub import check_name
from jetspec.settings import at_least

SHAPES = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-0.6b", "smollm2-135m")
"""Names of shapes that need no files."""
WIDTH = 8
"""Width of the trees of single operations."""


@dataclass(frozen=True)
class Where:
    """Shape and device of a measurement."""

    shape: str = "smollm2-135m"
    """qwen3-8b, qwen3-30b-a3b, qwen3-0.6b, smollm2-135m, or that of a model, folder or GGUF file."""
    dtype: DtypeName = "auto"
    """Number format. Auto, the default: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """cpu or cuda. Auto, the default: the GPU, if there is one."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            check_name(self.shape)


@dataclass(frozen=True)
class RoundOptions(Where):
    """Rounds to measure."""

    weights: Literal["random", "real"] = "random"
    """Weights of the target."""
    batch: int = 1
    """Requests decoded together."""
    budgets: tuple[int, ...] = (64,)
    """Nodes of a tree; repeatable."""
    contexts: tuple[int, ...] = (1024,)
    """Tokens before the tree; repeatable."""
    rounds: int | None = None
    """Rounds to time. By default 10, on a GPU 200."""
    max_len: int | None = None
    """Positions of a request in the cache. By default the model's context."""
    temperature: float = 0.0
    """Temperature of the target; 0 is greedy."""


@dataclass(frozen=True)
class OpOptions(Where):
    """Operations to measure."""

    batch: int = 1
    """Requests decoded together."""
    budget: int = 64
    """Nodes of a tree."""
    context: int = 1024
    """Tokens before the tree."""
    shortlist: int = TreeConfig.shortlist
    """Tokens per depth that an edge term ranks for each parent. 0: all."""
    window: int | None = None
    """Tokens before each that attention sees. By default all."""
    max_len: int | None = None
    """Positions of a request in the cache. By default the model's context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        TreeConfig(budget=self.budget, width=WIDTH, shortlist=self.shortlist)
        for name in ("context", "batch", "window"):
            at_least(1, name, getattr(self, name))
        if self.max_len is not None and self.max_len <= self.context:
            raise ValueError(f"max_len is {self.max_len}; it must be above the context of {self.context}")
