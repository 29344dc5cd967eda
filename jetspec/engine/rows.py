"""What the device knows of each admitted request.

Rounds read and write these columns, so a round needs nothing from the host but the rows that take part in it. What
the host changes, when a request joins, is gathered and reaches the device in one go before the next forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetspec.config import MAX_BUDGET, MAX_WIDTH
from jetspec.types import Request, RowSampling, TreeLimits

COLUMNS = {
    "length": torch.int64,
    "anchor": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "budget": torch.int64,
    "width": torch.int64,
}

NO_LIMITS = TreeLimits(MAX_BUDGET, MAX_WIDTH)


class RowTable:
    """Columns with one entry per row: tokens cached, the anchor, and how to sample."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self.columns = {name: torch.zeros(num_rows, dtype=dtype, device=device) for name, dtype in COLUMNS.items()}
        self.columns["top_p"].fill_(1)
        self.changes: dict[str, dict[int, Any]] = defaultdict(dict)

    @property
    def length_R(self) -> Tensor:
        return self.columns["length"]

    @property
    def anchor_R(self) -> Tensor:
        return self.columns["anchor"]

    def enter(self, request: Request) -> None:
        """A request was given its row."""
        sampling, limits = request.sampling, request.limits or NO_LIMITS
        self.set(
            request.row,
            length=request.num_cached,
            anchor=request.tokens[-1],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=request.seed,
            budget=limits.budget,
            width=limits.width,
        )

    def limits(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Budget and width of the trees of the given rows."""
        return self.columns["budget"][row_B], self.columns["width"][row_B]

    def set(self, row: int, **values: float) -> None:
        for name, value in values.items():
            self.changes[name][row] = value

    def flush(self) -> None:
        """Write the host's changes to the device."""
        for name, changed in self.changes.items():
            row = upload(list(changed), torch.int64, self.device)
            self.columns[name][row] = upload(list(changed.values()), COLUMNS[name], self.device)
        self.changes.clear()

    def sampling(self, row_B: Tensor, any_sampled: bool, any_filtered: bool) -> RowSampling:
        """How to sample the given rows. A greedy batch never looks, so nothing is gathered for it."""

        def column(name: str) -> Tensor:
            return self.columns[name][row_B] if any_sampled else self.columns[name][:0]

        return RowSampling(
            temperature_B=column("temperature"),
            top_k_B=column("top_k"),
            top_p_B=column("top_p"),
            min_p_B=column("min_p"),
            seed_B=column("seed"),
            any_sampled=any_sampled,
            any_filtered=any_filtered,
        )


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on the device. On a GPU the host does not wait for it to arrive."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
