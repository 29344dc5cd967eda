"""CUDA graphs of the draft. vLLM captures the target's pass; the draft after it is captured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

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
