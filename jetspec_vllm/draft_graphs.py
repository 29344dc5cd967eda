"""CUDA graphs of the draft. vLLM captures the target's pass; the draft after it is captured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from jetspec.capture import CapturedFn, GraphPool


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a draft: hidden states of committed tokens, and the position and pages of each request."""

    tap_TX: Tensor
    position_T: Tensor
    slot_T: Tensor
    page_BP: Tensor
    anchor_B: Tensor
    length_B: Tensor
    temperature_B: Tensor
    state_B: Tensor

    @classmethod
    def idle(
        cls,
        num_requests: int,
        *,
        path: int,
        tap_size: int,
        pages: int,
        unused_state: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DraftInputs:
        """Padding requests: they write to page 0 and to an unused tree."""

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows = num_requests * path
        return cls(
            tap_TX=torch.zeros(rows, tap_size, dtype=dtype, device=device),
            position_T=numbers(rows),
            slot_T=numbers(rows),
            page_BP=torch.zeros(num_requests, pages, dtype=torch.int32, device=device),
            anchor_B=numbers(num_requests),
            length_B=numbers(num_requests),
            temperature_B=torch.ones(num_requests, dtype=torch.float32, device=device),
            state_B=torch.full((num_requests,), unused_state, device=device),
        )

    def copy_(self, source: DraftInputs) -> None:
        """Overwrites the first requests by those of `source`, which may be fewer."""
        for field in fields(source):
            given = getattr(source, field.name)
            getattr(self, field.name)[: len(given)].copy_(given)

    def first(self, count: int) -> DraftInputs:
        """Inputs of the first `count` requests; all requests have the same number of rows."""
        path = len(self.position_T) // len(self.anchor_B)
        cut = {field.name: getattr(self, field.name) for field in fields(self)}
        return DraftInputs(
            **{name: x[: count * path if name.endswith(("_T", "_TX")) else count] for name, x in cut.items()}
        )


class DraftGraphs:
    """One graph per captured batch size. A batch is padded to the next size with idle requests."""

    def __init__(self, draft: Callable[[DraftInputs], Tensor], idle: DraftInputs, largest: int) -> None:
        self.idle, self.sizes = idle, batch_sizes(largest)
        self.draft = CapturedFn(draft, GraphPool(idle.anchor_B.device))
        inputs = replace(idle, **{field.name: getattr(idle, field.name).clone() for field in fields(idle)})
        for size in reversed(self.sizes):  # the first capture allocates the memory that the others share
            self.draft.capture(size, inputs.first(size))

    def run(self, inputs: DraftInputs) -> Tensor:
        """Draft tokens of a batch, valid until the next run."""
        count = len(inputs.anchor_B)
        size = next(size for size in self.sizes if size >= count)
        if size > count:
            self.draft.load(size, self.idle.first(size))
        return self.draft(size, inputs)[:count]


def batch_sizes(largest: int) -> list[int]:
    """Captured batch sizes: powers of two, and the largest."""
    return sorted({largest, *(1 << i for i in range(largest.bit_length()) if 1 << i < largest)})
